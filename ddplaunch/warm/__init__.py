"""The interpreter that is kept warm from run to run: found, started, asked and ended. Its own part is `worker/warm.py`."""
