#define HISPARSE_TARGET cpu_wave32
#define HISPARSE_CPU_WARP_SIZE 32
#include "kernels.h"
