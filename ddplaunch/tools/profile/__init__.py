"""`ddplaunch profile`: torch.profiler in the ranks of a running job; one trace of all, and how their steps divide.

`ranks` speaks with the workers, and `verb` is the command. `recorded` reads what a rank has sent, `division` says where the time
went, and `merged` writes the trace: these three are pure but for the files that they are given.
"""
