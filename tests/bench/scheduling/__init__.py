"""What deciding costs: the placer's core, plans of groups, bursts and batch windows."""
