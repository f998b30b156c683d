"""Changes of running jobs: migration by convergence, load balancing, cores, memory bandwidth."""
