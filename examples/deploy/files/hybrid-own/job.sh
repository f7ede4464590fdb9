#!/bin/bash
#SBATCH --job-name=hybrid
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --partition=gpu
#SBATCH --time=2-00:00:00
#SBATCH --gres=gpu:8
#SBATCH --requeue
#SBATCH --signal=USR1@150
#SBATCH --output=/home/you/deploy/slurm-%j.log
#SBATCH --open-mode=append
cd /home/you || exit 2
# A step has one processor for each task unless it asks for more, whatever its job has asked for.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
module load cuda
source .venv/bin/activate
export HEADWAY_MACHINES=2
export HEADWAY_SECRET_FILE=/home/you/deploy/secret
export HEADWAY_CODE_FILE=/home/you/deploy/code
rm -f /home/you/deploy/code
[ -e /home/you/deploy/secret ] || (umask 077 && head --bytes=32 /dev/urandom | base64 > /home/you/deploy/secret)
# Bash must outlive the signal that stops the run: it decides what follows.
trap : TERM USR1
# The step gets Slurm's signals; `wait` returns early when bash gets one too. The last call gives the step's exit code,
# which bash remembers, also if a signal came at the very end, or the step ended before the first call.
srun --kill-on-bad-exit=0 --wait=0 headway train /home/you/deploy/config.yaml &
step=$!
while wait $step; kill -0 $step 2>/dev/null; do :; done
code=0
wait $step || code=$?
# The step gives the highest code of all machines. That of the lead is the run's: it may have finished without a machine
# that was killed, or have asked for all of them again.
if grep --quiet --line-regexp --extended-regexp '[0-9]+' /home/you/deploy/code 2>/dev/null; then code=$(cat /home/you/deploy/code); fi

# While bash runs, a job that nobody has ended is RUNNING. After `scancel` it is COMPLETING, in which `scontrol requeue`
# would bring it back; so would it be after a preemption, of which there is a time, or of its limit.
about=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null; squeue --noheader --jobs "$SLURM_JOB_ID" --format=%T 2>/dev/null
    sacct --noheader --allocations --jobs "$SLURM_JOB_ID" --format=State%40 2>/dev/null)
says() { grep --quiet --extended-regexp "$1" <<< "$about"; }
preempted=no
says 'PreemptTime=[0-9]|PREEMPTED' && preempted=yes
over=no
[ "$(date +%s)" -lt "${SLURM_JOB_END_TIME:-9999999999}" ] || over=yes
again=no
case $code in
    75) if says 'JobState=RUNNING' || [ $preempted$over != nono ]; then again=yes; fi ;;
    143) again=$preempted ;;
esac
# `headway launch cancel` leaves this file; 7 is the code of a run that was cancelled.
[ ! -e /home/you/deploy/cancelled ] || { again=no; code=7; }
[ $again = no ] || scontrol requeue "$SLURM_JOB_ID" || true
exit $code
