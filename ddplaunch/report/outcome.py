from ddplaunch.outcome import Frame as Frame
from ddplaunch.outcome import WorkerError as WorkerError
from ddplaunch.outcome import WorkerExit as WorkerExit
