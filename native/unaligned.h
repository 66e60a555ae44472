/* unaligned.h: numbers out of a mapped .idx, whose arrays start at byte 34 and so are not aligned (C only). */
#ifndef BINIDX_UNALIGNED_H
#define BINIDX_UNALIGNED_H
#include <stdint.h>
#include <string.h>

static inline int32_t load_i32(const void *base, int64_t i) {
    int32_t value;
    memcpy(&value, (const char *)base + 4 * i, 4);
    return value;
}

static inline int64_t load_i64(const void *base, int64_t i) {
    int64_t value;
    memcpy(&value, (const char *)base + 8 * i, 8);
    return value;
}

#endif
