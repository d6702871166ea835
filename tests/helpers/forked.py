"""What the server of `fresh.py` imports before it forks: torch, and what takes long of it and of transformers."""

import gc
import importlib
import os

# The second comes with the native kernel, the third with most models; each takes a second.
for name in ("torch", "torch._dynamo", "transformers.models.llama.modeling_llama"):
    importlib.import_module(name)

# Where this file lies: no business of what is forked.
os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]

# No collection looks at all that again, which would copy each page of it into each process: half of their time.
gc.collect()
gc.freeze()
