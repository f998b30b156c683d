"""The node-reporter service: the agent that runs tasks on a node. A pure core and a thin shell."""
