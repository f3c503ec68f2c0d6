"""What the launcher tells its ranks through their environment, besides what torchrun would."""

SECRET = "VPIPE_SECRET"
"""The secret of the job: who does not know it does not take part. The launcher draws one for each job."""
LISTENER = "VPIPE_LISTENER"
"""Rank 0's alone: the number of the descriptor that listens on the job's port."""
