"""What a node-reporter has around it: the placer's side, keys, meters, a driver's library."""
