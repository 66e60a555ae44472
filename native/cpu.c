/* cpu.c: the widest vectors that this processor has and this system saves.
 *
 * By cpuid and xgetbv themselves: __builtin_cpu_supports and target_clones do not link into a shared object under every
 * compiler and libc. Source: Intel SDM volume 2A, CPUID; volume 1, 13.3 (XCR0).
 */
#include "cpu.h"

#if BINIDX_X86
typedef struct {
    uint32_t a, b, c, d;
} registers;

static registers cpuid(uint32_t leaf) {
    registers r;
    __asm__ volatile("cpuid" : "=a"(r.a), "=b"(r.b), "=c"(r.c), "=d"(r.d) : "0"(leaf), "2"(0));
    return r;
}

/* Which registers the system saves at a switch of threads; only where cpuid says that it tells (OSXSAVE). */
static uint32_t saved_registers(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static int has(uint32_t found, uint32_t needed) { return (found & needed) == needed; }

#define BIT(n) (1u << (n))

int binidx_cpu_level(void) {
    const uint32_t osxsave_avx_popcnt = BIT(27) | BIT(28) | BIT(23), lzcnt = BIT(5);
    const uint32_t bmi_avx2_bmi2 = BIT(3) | BIT(5) | BIT(8);
    const uint32_t avx512_f_dq_cd_bw_vl = BIT(16) | BIT(17) | BIT(28) | BIT(30) | BIT(31);
    const uint32_t xmm_ymm = BIT(1) | BIT(2), opmask_zmm = BIT(5) | BIT(6) | BIT(7);
    if (cpuid(0).a < 7 || !has(cpuid(1).c, osxsave_avx_popcnt)) return BINIDX_PORTABLE;
    if (cpuid(0x80000000u).a < 0x80000001u || !has(cpuid(0x80000001u).c, lzcnt)) return BINIDX_PORTABLE;
    if (!has(cpuid(7).b, bmi_avx2_bmi2) || !has(saved_registers(), xmm_ymm)) return BINIDX_PORTABLE;
    if (!has(cpuid(7).b, avx512_f_dq_cd_bw_vl) || !has(saved_registers(), opmask_zmm)) return BINIDX_AVX2;
    return BINIDX_AVX512;
}
#elif defined(__aarch64__)
int binidx_cpu_level(void) { return BINIDX_NEON; } /* every aarch64 has it */
#else
int binidx_cpu_level(void) { return BINIDX_PORTABLE; }
#endif
