/* blend_portable.c: blend_lanes.h, 2 chunks a vector, in the compiler's own vectors: SSE2, NEON, or two doubles. */
#include "blend_chunks.h"

#include <string.h>

#define TARGET
#define TURN(...) 0 /* one at a time */
#define UNROLL
enum { W = 2, GROUPS = 2 };
typedef double V __attribute__((vector_size(16)));
typedef int64_t M __attribute__((vector_size(16)));
#define SPLAT(x) ((V){(double)(x), (double)(x)})
#define ADD(a, b) ((a) + (b))
#define SUB(a, b) ((a) - (b))
#define MUL(a, b) ((a) * (b))
#define GT(a, b) ((M)((a) > (b)))
#define GE(a, b) ((M)((a) >= (b)))
#define EQ(a, b) ((M)((a) == (b)))
#define MAX(a, b) PICK(GT(a, b), a, b)

BINIDX_BLEND_INLINE V LOAD(const double *from) {
    V a;
    memcpy(&a, from, sizeof a);
    return a;
}

BINIDX_BLEND_INLINE void STORE(double *to, V a) { memcpy(to, &a, sizeof a); }

BINIDX_BLEND_INLINE V PICK(M set, V yes, V no) { return (V)((set & (M)yes) | (~set & (M)no)); }

/* The numbers of the set lanes, first and first + 1, written from datasets[found] on; returns found plus how many. */
BINIDX_BLEND_INLINE int64_t KEEP(int32_t *datasets, int64_t found, int64_t first, M set) {
    datasets[found] = (int32_t)first;
    found -= set[0];
    datasets[found] = (int32_t)first + 1;
    return found - set[1];
}

#include "blend_lanes.h"
const binidx_blend_level binidx_blend_portable = {GROUPS * W, chunks, replay};
