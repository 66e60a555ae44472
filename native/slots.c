/* slots.c: who may use a slot of memory that processes share: 0 nobody, 1 its taker.
 *
 * Taking acquires and giving back releases, so that the next taker writes only after the last reader has read.
 */
#include "binidx.h"

#include <stdatomic.h>

int binidx_take_slot(int64_t *state) {
    int64_t nobody = 0;
    return atomic_compare_exchange_strong((_Atomic int64_t *)state, &nobody, 1);
}

void binidx_give_slot(int64_t *state) { atomic_store_explicit((_Atomic int64_t *)state, 0, memory_order_release); }
