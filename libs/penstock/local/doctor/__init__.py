"""`penstock doctor`: diagnostic checks of this machine, of servers, certificates and clocks, of the cell."""
