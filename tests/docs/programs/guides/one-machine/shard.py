import os

print("loading the data")
print("starting")
print(f"my shard is {os.environ['RANK']}")
