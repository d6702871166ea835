// Stands in for libtorch_cpu.so while linking: the same soname, the functions we call, no bodies. At run time the
// dynamic loader finds the soname already loaded, by `import torch`; this file's library is never installed.
#include <stdlib.h>

#include "torch_abi/torch_abi.h"

extern "C" {
#define HEADWISE_DEFINE(result, name, parameters) \
  result name parameters { abort(); }
HEADWISE_TORCH_ABI(HEADWISE_DEFINE)
}
