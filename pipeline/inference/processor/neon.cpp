// For processors of ARM with NEON, which all of 64 bits have.
#ifdef __aarch64__
#include "system.h"

#define BUILD neon
#define LANES 4
#include "build.h"
#endif
