"""HTTP routes: handlers of jobs, logs, events, the cell and code archives. `gateway/README.md` lists
each route."""
