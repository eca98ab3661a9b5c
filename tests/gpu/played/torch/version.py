from typing import Optional

__version__ = "2.13.0+cu130"
cuda: Optional[str] = "13.0"  # noqa: UP045 - as torch writes it, and ddplaunch reads it
