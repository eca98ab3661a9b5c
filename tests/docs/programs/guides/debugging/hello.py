import os

print(f"hello from rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} on {os.environ['DDPLAUNCH_DEVICE']}")
