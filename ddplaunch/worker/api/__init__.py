"""What `import ddplaunch` offers a script: its rank, its device, its group, and whether to stop. Starts no process."""
