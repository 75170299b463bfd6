// What the files of the forms for x86-64 begin with. They are compiled for their instruction set, so no code of theirs may run
// before choice.cpp has asked the processor for it.
#pragma once
#include <immintrin.h>
#include <string.h>

#include "kernels.hpp"

#define LANES_AVX2
#define TARGET  // files have it
