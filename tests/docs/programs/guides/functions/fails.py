import os

import ddplaunch


# the page shows the numbers of these lines
def train():
    if os.environ["RANK"] == "1":
        raise ValueError("loss is nan")
    os.read(os.pipe()[0], 1)  # for ever


if __name__ == "__main__":
    ddplaunch.launch(train, nproc_per_node=3)
