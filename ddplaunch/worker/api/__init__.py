"""What `import ddplaunch` offers a script: where it is, its device, its group, and whether to stop. Starts no process."""
