"""The environment variables by which the launcher configures its ranks, besides those of torchrun."""

SECRET = "VPIPE_SECRET"
"""The secret of the job: a process that does not know it cannot take part. The launcher draws one for each job."""
LISTENER = "VPIPE_LISTENER"
"""Set for rank 0 alone: the descriptor of the socket that listens on the job's port."""
IDLE = "VPIPE_IDLE"
"""Set for a rank beside which others were started that have no stage: their number (`launch/idle.py`)."""
DEVICE = "VPIPE_DEVICE"
"""The device of a rank: 'cpu' or 'cuda:<number>'."""
GPU_SHARE = "VPIPE_GPU_SHARE"
"""The number of ranks that share the GPU of a rank: each may use an equal part of its memory."""
PROFILE_NAME = "VPIPE_PROFILE_NAME"
"""Set for ranks that measure the profile of their own run: the name under which it is kept for later runs."""
BIND = "VPIPE_BIND"
"""0: a rank is not bound to the cores of its GPU's NUMA node (`system/cores.py`)."""
COMPILE_THREADS, MOST_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS", 32
"""Processes that torch's compiler starts on a rank, and the most that it starts by itself."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Settings of torch's allocator of GPU memory, such as 'expandable_segments:True,max_split_size_mb:64'. The first of
them that is set holds; it is the older name, which every torch reads."""
