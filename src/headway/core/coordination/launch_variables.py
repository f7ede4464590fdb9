"""The environment variables by which launchers describe machines and workers.

A leaf that imports nothing: `core.startup.early_stop` reads it before anything that takes time.
"""

#: The number of machines, or a range; the number of this one; and HOST:PORT of machine 0.
MACHINES = "HEADWAY_MACHINES"
NODE = "HEADWAY_NODE"
LEAD = "HEADWAY_LEAD"
#: The address of this machine at which it listens when it leads, so that it need not know its own name.
LISTEN = "HEADWAY_LISTEN"
#: What the machines of a run share, by which they recognise each other; or a file with it.
SECRET = "HEADWAY_SECRET"
SECRET_FILE = "HEADWAY_SECRET_FILE"
#: A file on a disk that all machines share, in which the lead leaves the exit code of the run for its launcher.
CODE_FILE = "HEADWAY_CODE_FILE"
#: A name for the machines that a launcher has started together, none of which it starts again alone. Their secret is
#: derived from it and a file beside the run directories, and so is the port, where `LEAD` has none.
GANG = "HEADWAY_GANG"
#: By these schedulers number machines, where NODE does not.
NODE_NUMBERS = ("JOB_COMPLETION_INDEX", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "RANK")
#: By these torchrun, Ray and Kubeflow describe one worker. A node process is none, and its workers get their own.
OF_A_WORKER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
