"""headwise for transformers models: `import headwise.hf`, then `attn_implementation="headwise"`.

>>> import headwise.hf
>>> from transformers import GPT2Config, GPT2LMHeadModel
>>> config = GPT2Config(n_embd=24, n_head=4, n_layer=1, vocab_size=11, n_positions=13)
>>> model = GPT2LMHeadModel._from_config(config, attn_implementation="headwise")

Every model on transformers' attention interface runs without code specific to it. The models of
`models.architectures.OWN_ATTENTION`, which have their own attention code, run too. Masks are passed as structural masks
(causal, windows, chunks, padding, packed sequences), together with caches, softcaps, sinks and position biases. Options
that headwise does not support raise an error. No other part of the package needs transformers.
"""

from ..extras import missing_extra

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise missing_extra("headwise.hf", "hf", error) from None

from .attention.function import headwise_attention
from .attention.mask import StructuralMask, headwise_mask
from .decode.cache import make_cache
from .decode.continuous_batching import NAME as BATCHING
from .decode.continuous_batching import batched_attention, serving
from .decode.fast_decode import FastDecode, fast_decode
from .distributed.context_parallel import Shards, context_parallel
from .distributed.tensor_parallel import tensor_parallel, tensor_parallel_config
from .errors import ModelError
from .loading.checkpoint import Checkpoint, checkpoint
from .loading.layouts import layouts
from .loading.model import Loaded, load
from .loading.processor import Prepared, prepared
from .models.heads_by_layer import register_configs
from .models.support import NAME
from .pickling import import_where_unpickled
from .probing import probe
from .training_callback import WatchCallback
from .validate import check_what_is_built

AttentionInterface.register(NAME, headwise_attention)
AttentionMaskInterface.register(NAME, headwise_mask)
AttentionInterface.register(BATCHING, batched_attention)
AttentionMaskInterface.register(BATCHING, headwise_mask)
check_what_is_built()
import_where_unpickled()
register_configs()

__all__ = [
    "Checkpoint",
    "FastDecode",
    "Loaded",
    "ModelError",
    "Prepared",
    "Shards",
    "StructuralMask",
    "WatchCallback",
    "checkpoint",
    "context_parallel",
    "fast_decode",
    "layouts",
    "load",
    "make_cache",
    "prepared",
    "probe",
    "serving",
    "tensor_parallel",
    "tensor_parallel_config",
]
