"""The one loop that every process of ddplaunch waits in, and what flows through it: buffers and frames for streams."""
