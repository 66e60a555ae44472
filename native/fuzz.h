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

static inline void same(int claim) {
    if (claim) return;
    fputs("fuzz: not the plain rule\n", stderr);
    abort();
}

/* Fresh memory: one item too many is seen. */
static inline void *bytes_of(int64_t bytes) {
    void *memory = malloc(bytes ? (size_t)bytes : 1);
    if (!memory) abort();
    return memset(memory, 0xa5, (size_t)bytes);
}

#endif
