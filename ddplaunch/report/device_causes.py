"""Causes of a worker's end that lie in a GPU, its driver, or a torch that does not fit them: rows of the table of causes."""

from __future__ import annotations

from ddplaunch.report.evidence import Row, matches

OF_DEVICES: tuple[Row, ...] = (
    Row(
        "CUDA after fork",
        matches(r"Cannot re-initialize (?:CUDA|XPU) in forked subprocess"),
        'the GPU was used before a fork: give the DataLoader multiprocessing_context="forkserver" (or "spawn")',
    ),
    Row(
        "invalid device ordinal",
        matches(r"invalid device ordinal|AssertionError: Invalid device id|device >= 0 && device < num_gpus"),
        "this worker has no such device, its own is {device}: use LOCAL_RANK; see `--pin` and `ddplaunch plan`",
    ),
    Row(
        "two workers on one GPU",
        matches(r"Duplicate GPU detected"),
        "NCCL needs a GPU for each worker: call torch.cuda.set_device(LOCAL_RANK) before init, or `--backend gloo`",
    ),
    Row(
        "backend not built in",
        matches(r"Distributed package doesn't have \w+ built in|ProcessGroupNCCL is only supported"),
        'this torch lacks it: `--backend gloo`, and in the script init_process_group(os.environ["DDPLAUNCH_BACKEND"])',
    ),
    Row(
        "torch without CUDA",
        matches(r"Torch not compiled with CUDA enabled|module 'torch\._C' has no attribute '_cuda_\w+'"),
        "the torch of {interpreter} is a CPU-only build: install a CUDA build, or run on the CPU",
    ),
    Row(
        "no driver",
        matches(r"Found no NVIDIA driver|No CUDA GPUs are available"),
        "the worker sees no GPU: check `nvidia-smi`, CUDA_VISIBLE_DEVICES and what the scheduler granted",
    ),
    Row(
        "fault in a GPU kernel",
        matches(r"an illegal memory access was encountered|device-side assert triggered|unspecified launch failure"),
        "the line shown may be a later one: `--env CUDA_LAUNCH_BLOCKING=1` makes the traceback exact",
    ),
    Row(
        "hardware fault of a GPU",
        matches(r"uncorrectable (?:ECC|NVLink) error|GPU is lost|fallen off the bus"),
        "the GPU itself has failed, not the script ({device} of this worker): see `nvidia-smi -q` and `dmesg | grep Xid`, "
        "and leave it out (`--devices`) until it is reset",
    ),
    Row(
        "no kernel for this GPU",
        matches(r"no kernel image is available for execution on the device"),
        "the torch of {interpreter}, or a package with CUDA code, was not built for this kind of GPU: install another build",
    ),
    Row(
        "driver too old",
        matches(r"driver on your system is too old|driver version is insufficient for CUDA runtime version"),
        "the torch of {interpreter} needs a newer driver than this machine has: install a build for an older CUDA",
    ),
    Row(
        "GPU in use by others",
        matches(
            r"CUDA-capable device\(s\) is/are busy or unavailable|all CUDA-capable devices are busy or unavailable"
        ),
        "another process has it, and it takes one only (`nvidia-smi -q -d COMPUTE`), or its driver hangs: take a free one "
        "(`--devices`)",
    ),
    Row(
        "GPUs not set up",
        matches(r"[Ee]rror 802: system not yet initialized|CUDA error: system not yet initialized"),
        "the node's GPUs are not set up: an administrator has to start nvidia-fabricmanager",
    ),
)
