"""What services run on in the laboratory: machines with disks, processes and clocks, and a log."""
