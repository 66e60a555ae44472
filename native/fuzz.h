/* fuzz.h: what fuzz targets share: the input number by number, and buffers exactly as long as their contents. */
#ifndef BINIDX_FUZZ_H
#define BINIDX_FUZZ_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const uint8_t *data;
    size_t left;
} fuzz_input;

/* The next number of so many bytes, low byte first; missing bytes are 0. */
static inline int64_t next(fuzz_input *in, int bytes) {
    uint64_t value = 0;
    for (int b = 0; b < bytes && in->left; b++, in->left--) value |= (uint64_t)*in->data++ << 8 * b;
    return (int64_t)value;
}

/* FNV-1a of what the functions gave for all inputs: the same for every processor and compiler. */
__attribute__((weak)) uint64_t fuzz_digest = 0xcbf29ce484222325u;

static inline void note(const void *given, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++) fuzz_digest = (fuzz_digest ^ ((const uint8_t *)given)[i]) * 0x100000001b3u;
}

static inline void same(int claim) {
    if (claim) return;
    fputs("fuzz: not the plain rule\n", stderr);
    abort();
}

/* Fresh memory: one item too many is seen. */
static inline void *bytes_of(int64_t bytes) {
    void *memory = malloc((size_t)bytes + !bytes);
    if (!memory) abort();
    return memset(memory, 0xa5, (size_t)bytes);
}

#endif
