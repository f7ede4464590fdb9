"""Ways to start a run on a cluster, one file each: every one starts the same command on each machine."""
