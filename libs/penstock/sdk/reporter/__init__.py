"""Link of a training script to its node-reporter: report lines, registered savers, the task's own folder."""
