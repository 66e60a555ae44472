/* blend_lanes.h: the chunks of a blend side by side in vector lanes; included once for each width by blend_*.c, which
 * says what a vector V of W doubles is.
 *
 *     slot   lane 0     lane 1     lane 2     lane 3          one V a slot: weights and counts of one dataset in W chunks
 *       0    w0, c0     w0, c0     w0, c0     w0, c0
 *       1    w1, c1     w1, c1     w1, c1     w1, c1          w * drawn - c of all W chunks at once, the best kept by a
 *      ...                                                    compare and a blend: nothing goes across the lanes
 *
 * Three ways, by the number of datasets:
 *   up to 16     counts stay in registers; cost about one operation a dataset and sample.
 *   up to WHOLE  the slots above; cost about half a cycle a dataset and sample in 8 lanes.
 *   more         a window: the few datasets of each lane that can win within the next `horizon` samples. `behind` only
 *                grows until a dataset is drawn (rounding is monotone), so whoever is below `floor` at the last of them is
 *                below it at each; a winner at or above floor is the winner of all. One below it: that lane alone looks
 *                at all datasets. The horizon and the floor adapt so that windows are nearly full and misses rare; where
 *                masses of datasets stand within a rounding of each other no window holds and all is looked at.
 *                Cost: SLOTS + num_datasets / horizon (about 50) a sample.
 */
#include "blend_chunks.h"

enum { SMALL = 16, WHOLE = 128, WINDOW = 64, ROWS = 64, STUCK = 64 };

typedef struct {
    _Alignas(64) double weights[WHOLE * W], counts[WHOLE * W];
    int32_t datasets[W][WHOLE + W]; /* of each slot, rising */
    int64_t filled[W];
    double floor[W]; /* nobody outside the window reaches it */
    double level[W]; /* how far behind the least of the last winners was */
} window;

/* In each lane the first slot of those furthest behind. In pairs: one compare decides for two. */
TARGET BINIDX_BLEND_INLINE void scan(const double *weights, const double *counts, int64_t slots, V drawn, V *best,
                                     V *slot) {
    V most = SPLAT(-INFINITY), at = SPLAT(0), now = SPLAT(0), left = SPLAT(-INFINITY);
    for (int64_t i = 0; i < slots; i += 2) {
        V one = SUB(MUL(LOAD(weights + i * W), drawn), LOAD(counts + i * W));
        V two = SUB(MUL(LOAD(weights + i * W + W), drawn), LOAD(counts + i * W + W));
        V more = MAX(one, two);
        M behind = GT(more, most);
        at = PICK(behind, now, at);
        left = PICK(behind, one, left);
        most = MAX(more, most);
        now = ADD(now, SPLAT(2));
    }
    *best = most;
    *slot = PICK(EQ(left, most), at, ADD(at, SPLAT(1)));
}

/* A few datasets of one chunk. */
BINIDX_BLEND_INLINE int64_t furthest_of_few(const binidx_blend *blend, const double *counts, double drawn) {
    double most = blend->weights[0] * drawn - counts[0];
    int64_t furthest = 0;
    for (int64_t d = 1; d < blend->num_datasets; d++) {
        double behind = blend->weights[d] * drawn - counts[d];
        if (behind > most) most = behind, furthest = d;
    }
    return furthest;
}

/* All datasets of one chunk: dataset = slot * W + lane. */
TARGET BINIDX_BLEND_INLINE int64_t furthest(const binidx_blend *blend, const double *counts, double drawn, double *most) {
    double bests[W], slots[W];
    V best, slot;
    scan(blend->weights, counts, blend->width / W, SPLAT(drawn), &best, &slot);
    STORE(bests, best), STORE(slots, slot);
    int64_t lane = 0;
    for (int64_t k = 1; k < W; k++)
        if (bests[k] > bests[lane] || (bests[k] == bests[lane] && slots[k] < slots[lane])) lane = k;
    *most = bests[lane];
    return (int64_t)slots[lane] * W + lane;
}

TARGET static int64_t replay(const binidx_blend *blend, int64_t first, int64_t stop, double *counts, double *guess) {
    const int few = blend->num_datasets <= SMALL;
    int64_t different = guess ? 0 : 1, sample = first;
    double most;
    for (int64_t d = 0; guess && d < blend->width; d++) different += counts[d] != guess[d];
    for (; sample < stop && different; sample++) {
        double drawn = binidx_blend_drawn(sample);
        int64_t right = few ? furthest_of_few(blend, counts, drawn) : furthest(blend, counts, drawn, &most);
        int64_t guessed = right;
        if (guess) {
            guessed = blend->dataset_index[sample];
            different -= (counts[right] != guess[right]) + (guessed != right && counts[guessed] != guess[guessed]);
            guess[guessed] = binidx_blend_after(blend, guessed, guess[guessed]);
        }
        binidx_blend_take(blend, sample, right, counts + right);
        if (guess) different += (counts[right] != guess[right]) + (guessed != right && counts[guessed] != guess[guessed]);
    }
    return sample - first;
}

/* ---- up to 16 datasets: counts in registers ---- */

/* Some rows of W lanes, `stride` apart, into W runs of rows, `length` apart. */
TARGET BINIDX_BLEND_INLINE void write_turned(const double *picks, const double *numbers, int64_t stride, int64_t rows,
                                             int16_t *datasets, int64_t *samples, int64_t length) {
    if (rows == W && TURN(picks, numbers, stride, datasets, samples, length)) return;
    for (int64_t lane = 0; lane < W; lane++, datasets += length, samples += length) {
        for (int64_t row = 0; row < rows; row++) datasets[row] = (int16_t)picks[row * stride + lane];
        for (int64_t row = 0; row < rows; row++) samples[row] = (int64_t)numbers[row * stride + lane];
    }
}

/* One sample of W chunks. n and limited are constants where this is inlined. */
TARGET BINIDX_BLEND_INLINE void draw(const binidx_blend *blend, const int n, const int limited, V drawn, V *counts,
                                     double *pick, double *count) {
    V most = SPLAT(-INFINITY), at = SPLAT(0), left = SPLAT(-INFINITY), number = SPLAT(0);
    UNROLL
    for (int d = 0; d < n; d += 2) {
        V one = SUB(MUL(SPLAT(blend->weights[d]), drawn), counts[d]);
        V two = SUB(MUL(SPLAT(blend->weights[d + 1]), drawn), counts[d + 1]);
        V more = MAX(one, two);
        M behind = GT(more, most);
        at = PICK(behind, SPLAT(d), at);
        left = PICK(behind, one, left);
        most = MAX(more, most);
    }
    at = PICK(EQ(left, most), at, ADD(at, SPLAT(1)));
    UNROLL
    for (int d = 0; d < n; d++) {
        M drawn_from = EQ(at, SPLAT(d));
        number = PICK(drawn_from, counts[d], number);
        counts[d] = PICK(drawn_from, ADD(counts[d], SPLAT(1)), counts[d]);
        if (limited) counts[d] = PICK(GT(SPLAT(blend->limits[d]), counts[d]), counts[d], SPLAT(INFINITY));
    }
    if (limited) number = PICK(GT(SPLAT(INFINITY), number), number, SPLAT(0)); /* infinite only after a wrong guess */
    STORE(pick, at), STORE(count, number);
}

TARGET BINIDX_BLEND_INLINE void small_chunks(const binidx_blend *blend, int64_t first, int64_t length, double *counts,
                                             const int n, const int limited) {
    double picks[ROWS][GROUPS * W], numbers[ROWS][GROUPS * W], lanes[W];
    V held[GROUPS][SMALL], drawn[GROUPS];
    for (int g = 0; g < GROUPS; g++) {
        for (int d = 0; d < n; d++) {
            for (int lane = 0; lane < W; lane++) lanes[lane] = counts[(g * W + lane) * blend->width + d];
            held[g][d] = LOAD(lanes);
        }
        for (int lane = 0; lane < W; lane++) lanes[lane] = (double)(first + (g * W + lane) * length);
        drawn[g] = LOAD(lanes);
    }
    for (int64_t done = 0; done < length; done += ROWS) {
        int64_t rows = length - done < ROWS ? length - done : ROWS;
        for (int64_t row = 0; row < rows; row++) {
            UNROLL
            for (int g = 0; g < GROUPS; g++) {
                draw(blend, n, limited, MAX(drawn[g], SPLAT(1)), held[g], picks[row] + g * W, numbers[row] + g * W);
                drawn[g] = ADD(drawn[g], SPLAT(1));
            }
        }
        for (int g = 0; g < GROUPS; g++)
            for (int64_t row = 0; row < rows; row += W) {
                int64_t at = first + g * W * length + done + row;
                write_turned(picks[row] + g * W, numbers[row] + g * W, GROUPS * W, rows - row < W ? rows - row : W,
                             blend->dataset_index + at, blend->dataset_sample_index + at, length);
            }
    }
    for (int g = 0; g < GROUPS; g++)
        for (int d = 0; d < n; d++) {
            STORE(lanes, held[g][d]);
            for (int lane = 0; lane < W; lane++) counts[(g * W + lane) * blend->width + d] = lanes[lane];
        }
}

/* ---- more: slots in memory, all datasets or a window of them ---- */

/* The datasets at or above floor once `drawn`, into `datasets`; more than `most` of them: some number above it. */
TARGET static int64_t candidates(const binidx_blend *blend, const double *counts, double drawn, double floor, int64_t most,
                                 int32_t *datasets) {
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

/* A window for the next samples of W chunks, at most `horizon`; returns for how many it holds, 0 when there is none. */
TARGET static int64_t choose(const binidx_blend *blend, window *w, int64_t first, int64_t length, int64_t horizon,
                             double margin, const double *counts) {
    int64_t most = blend->width <= WHOLE ? WHOLE : WINDOW;
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
TARGET BINIDX_BLEND_INLINE int64_t row(const binidx_blend *blend, window *w, int64_t slots, int64_t first, int64_t length,
                                       V drawn, double *counts) {
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
            holds = choose(blend, w + g, first + done + g * W * length, length, holds, margin, counts + g * W * blend->width);
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
        horizon = !holds ? 16 : full < WINDOW * 7 / 8 && holds == asked ? horizon + horizon / 8 + 1 : holds;
    }
}

#define SMALL_CHUNKS(n)                                                                                                \
    if (blend->num_datasets <= n) {                                                                                    \
        if (blend->limits) small_chunks(blend, first, length, counts, n, 1);                                           \
        else small_chunks(blend, first, length, counts, n, 0);                                                         \
        return;                                                                                                        \
    }

TARGET static void chunks(const binidx_blend *blend, int64_t first, int64_t length, double *counts) {
    SMALL_CHUNKS(2)
    SMALL_CHUNKS(4)
    SMALL_CHUNKS(8)
    SMALL_CHUNKS(16)
    slot_chunks(blend, first, length, counts);
}

