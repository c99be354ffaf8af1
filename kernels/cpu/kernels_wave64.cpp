#define HISPARSE_TARGET cpu_wave64
#define HISPARSE_CPU_WARP_SIZE 64
#include "kernels.h"
