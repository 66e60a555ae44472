/* blend_window.h: chunks of a blend of more datasets than registers hold; part of blend_lanes.h.
 *
 *   up to WHOLE  all in slots. Cost: about half a cycle a dataset and sample in 8 lanes.
 *   more         a window: the few datasets of each lane that can win within the next `horizon` samples. `behind` only
 *                grows until a dataset is drawn (rounding is monotone), so whoever is below `floor` at the last of them
 *                is below it at each; a winner at or above floor is the winner of all. One below it: that lane alone
 *                looks at all datasets. The horizon and the floor adapt so that windows are nearly full and misses
 *                rare; where masses of datasets are level no window holds, and each sample looks at all.
 *                Cost: window_slots + num_datasets / horizon a sample; the horizon is a little less than the slots.
 */
enum { WHOLE = 128, WINDOW = 64, STUCK = 64 };

typedef struct {
    _Alignas(64) double weights[WHOLE * W], counts[WHOLE * W];
    int32_t datasets[W][WHOLE + W]; /* of each slot, rising */
    int64_t filled[W];
    double floor[W]; /* nobody outside the window reaches it */
    double level[W]; /* how far behind the least of the last winners was */
} window;

/* The datasets at or above floor once `drawn`, into `datasets`; more than `most` of them: some number above it. */
TARGET static int64_t candidates(const binidx_blend *blend, const double *counts, double drawn, double floor,
                                 int64_t most, int32_t *datasets) {
    int64_t found = 0;
    for (int64_t d = 0; d < blend->width && found <= most; d += W)
        found = KEEP(datasets, found, d,
                     GE(SUB(MUL(LOAD(blend->weights + d), SPLAT(drawn)), LOAD(counts + d)), SPLAT(floor)));
    return found;
}

/* Slots of one lane from its counts, and back. Slots after the last can never win. */
TARGET static void fill(const binidx_blend *blend, window *w, int64_t lane, int64_t slots, const double *counts) {
    for (int64_t i = 0; i < w->filled[lane]; i++) {
        w->weights[i * W + lane] = blend->weights[w->datasets[lane][i]];
        w->counts[i * W + lane] = counts[w->datasets[lane][i]];
    }
    for (int64_t i = w->filled[lane]; i < slots; i++) w->weights[i * W + lane] = 0, w->counts[i * W + lane] = INFINITY;
}

TARGET static void spill(const window *w, int64_t lane, double *counts) {
    for (int64_t i = 0; i < w->filled[lane]; i++) counts[w->datasets[lane][i]] = w->counts[i * W + lane];
}

/* More where choosing them, once in about as many samples, costs more than scanning them, once a sample: measured. */
BINIDX_BLEND_INLINE int64_t window_slots(const binidx_blend *blend) {
    return blend->width <= WHOLE || blend->width * W > 6144 ? WHOLE : WINDOW;
}

/* A window for the next samples of W chunks, at most `horizon`; returns for how many it holds, 0 when there is none. */
TARGET static int64_t choose(const binidx_blend *blend, window *w, int64_t first, int64_t length, int64_t horizon,
                             double margin, const double *counts) {
    int64_t most = window_slots(blend);
    for (int64_t lane = 0; lane < W && horizon; lane++) {
        w->floor[lane] = w->level[lane] - margin;
        do {
            double last = binidx_blend_drawn(first + lane * length + horizon - 1);
            w->filled[lane] =
                candidates(blend, counts + lane * blend->width, last, w->floor[lane], most, w->datasets[lane]);
        } while (w->filled[lane] > most && (horizon = horizon * 3 / 4));
    }
    return horizon;
}

/* The chosen datasets into their slots (none of them where nothing holds); returns how many slots there are. */
TARGET static int64_t fill_all(const binidx_blend *blend, window *w, int64_t holds, const double *counts) {
    int64_t slots = 0;
    for (int64_t lane = 0; lane < W; lane++) {
        if (!holds) w->filled[lane] = 0, w->floor[lane] = INFINITY;
        if (w->filled[lane] > slots) slots = w->filled[lane];
        w->level[lane] = INFINITY;
    }
    slots += slots & 1;
    for (int64_t lane = 0; lane < W; lane++) fill(blend, w, lane, slots, counts + lane * blend->width);
    return slots;
}

/* A lane whose window may not hold the winner: all its datasets, once. */
TARGET static __attribute__((noinline)) void missed(const binidx_blend *blend, window *w, int64_t lane, int64_t sample,
                                                    double *counts) {
    double best;
    spill(w, lane, counts);
    int64_t dataset = furthest(blend, counts, binidx_blend_drawn(sample), &best);
    if (best < w->level[lane]) w->level[lane] = best;
    binidx_blend_take(blend, sample, dataset, counts + dataset);
    for (int64_t i = 0; i < w->filled[lane]; i++)
        if (w->datasets[lane][i] == dataset) w->counts[i * W + lane] = counts[dataset];
}

/* One sample of W chunks; returns how many lanes missed. */
TARGET BINIDX_BLEND_INLINE int64_t row(const binidx_blend *blend, window *w, int64_t slots, int64_t first,
                                       int64_t length, V drawn, double *counts) {
    double at[W], bests[W];
    V best, slot, floor = LOAD(w->floor), level = LOAD(w->level);
    int64_t misses = 0;
    scan(w->weights, w->counts, slots, drawn, &best, &slot);
    STORE(bests, best), STORE(at, slot);
    STORE(w->level, PICK(GE(best, floor), PICK(GT(level, best), best, level), level));
    for (int64_t lane = 0; lane < W; lane++, first += length) {
        int64_t i = (int64_t)at[lane];
        if (__builtin_expect(bests[lane] < w->floor[lane], 0)) {
            missed(blend, w, lane, first, counts + lane * blend->width);
            misses++;
        } else {
            binidx_blend_take(blend, first, w->datasets[lane][i], w->counts + i * W + lane);
        }
    }
    return misses;
}

/* GROUPS * W chunks: while one group waits for its counts to be stored the other is scanned. */
TARGET static void slot_chunks(const binidx_blend *blend, int64_t first, int64_t length, double *counts) {
    const int whole = blend->width <= WHOLE;
    int64_t horizon = whole ? length : 1, slots[GROUPS];
    double margin = whole ? INFINITY : 16.0 / (double)blend->width, starts[GROUPS * W];
    window w[GROUPS];
    for (int64_t lane = 0; lane < GROUPS * W; lane++) {
        w[lane / W].level[lane % W] = whole ? 0 : INFINITY; /* the first window is empty: all is looked at */
        starts[lane] = (double)(first + lane * length);
    }
    for (int64_t done = 0; done < length;) {
        int64_t left = length - done, misses = 0, asked = horizon < left ? horizon : left, holds = asked, full = 0;
        for (int64_t g = 0; g < GROUPS; g++)
            holds = choose(blend, w + g, first + done + g * W * length, length, holds, margin,
                           counts + g * W * blend->width);
        for (int64_t g = 0; g < GROUPS; g++) {
            slots[g] = fill_all(blend, w + g, holds, counts + g * W * blend->width);
            if (slots[g] > full) full = slots[g];
        }
        for (int64_t end = done + (holds ? holds : left < STUCK ? left : STUCK); done < end; done++) {
            if (holds && misses > W) break;
            for (int64_t g = 0; g < GROUPS; g++) {
                V drawn = MAX(ADD(LOAD(starts + g * W), SPLAT((double)done)), SPLAT(1));
                misses += row(blend, w + g, slots[g], first + done + g * W * length, length, drawn,
                              counts + g * W * blend->width);
            }
        }
        for (int64_t lane = 0; lane < GROUPS * W; lane++)
            spill(w + lane / W, lane % W, counts + lane * blend->width);
        if (whole) continue;
        margin *= !holds ? 0.5 : misses ? 1.1 : 0.99;
        const int roomy = full < window_slots(blend) * 7 / 8 && holds == asked;
        horizon = !holds ? 16 : roomy ? horizon + horizon / 8 + 1 : holds;
    }
}
