/* cpu.h: what stands around a vector body (C only: cffi reads binidx.h alone).
 *
 *     #if BINIDX_X86
 *     BINIDX_TARGET_AVX2 static void draw_avx2(...) { ... intrinsics ... }
 *     BINIDX_TARGET_AVX512 static void draw_avx512(...) { ... }
 *     #endif
 *
 * The attribute lets one object file hold all levels without an -m flag. A `static inline` helper of such a body needs
 * the same attribute, or it is not inlined.
 */
#ifndef BINIDX_CPU_H
#define BINIDX_CPU_H
#include "binidx.h"

#if defined(__x86_64__)
#define BINIDX_X86 1
#define BINIDX_TARGET_AVX2 __attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt")))
#define BINIDX_TARGET_AVX512 \
    __attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512cd,avx512dq,avx512vl")))
#include <immintrin.h>
#else
#define BINIDX_X86 0
#endif

#endif
