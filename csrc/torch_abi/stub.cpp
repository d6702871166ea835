// Replaces libtorch_cpu.so while linking: it has the same soname and the functions that we call, without bodies. At run
// time the dynamic loader finds a library of that soname already loaded by `import torch`. This file's library is never
// installed.
#include <stdlib.h>

#include "torch_abi/torch_abi.h"

extern "C" {
#define HEADWISE_DEFINE(result, name, parameters) \
  result name parameters { abort(); }
HEADWISE_TORCH_ABI(HEADWISE_DEFINE)
}
