import os

rank, device = os.environ["RANK"], os.environ["DDPLAUNCH_DEVICE"]
print(f"rank {rank}: {device}, CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}")
