/* Owns the inner loops of sampling: the search of the largest values, exponentials, logarithms, powers, and sums one
   after another, as llama.cpp's are: at a boundary their last bit decides. What they are for is said in ggufpy/sampling.
   Of ggml it borrows the threads. */

/* So many values are found by a heap, and by nothing else; more by sorting. */
enum { GGUFPY_FEW = 1024 };

/* --- the largest values -------------------------------------------------------------------------------------- */

/* A value and its place in one number: larger for a larger value, and among equals for a lower place. */
static inline uint64_t ranked(float value, int64_t place) {
    uint32_t bits;
    value += 0.0f;  /* makes -0 a plain 0 */
    memcpy(&bits, &value, sizeof bits);
    bits ^= bits >> 31 ? 0xFFFFFFFFu : 0x80000000u;
    return (uint64_t) bits << 32 | (0xFFFFFFFFu - (uint32_t) place);
}

static inline int64_t place_of(uint64_t rank) { return 0xFFFFFFFFu - (uint32_t) rank; }

/* Puts a rank into a heap of n, the lowest on top, at `hole` or below. */
static inline void sink(uint64_t * heap, int64_t n, int64_t hole, uint64_t rank) {
    for (int64_t child; (child = 2 * hole + 1) < n; hole = child) {
        child += child + 1 < n && heap[child + 1] < heap[child];
        if (rank <= heap[child]) {
            break;
        }
        heap[hole] = heap[child];
    }
    heap[hole] = rank;
}

/* The places of the k largest of n values, largest first, the lowest place first among equals; k <= n < 2^32. */
static void ggufpy_largest(const float * values, int64_t n, int64_t k, int64_t * places) {
    enum { BLOCK = 32 };  /* looked at together: hardly any holds a value that counts */
    uint64_t * heap = (uint64_t *) places;
    for (int64_t i = k - 1; i >= 0; i--) {
        sink(heap, k, i, ranked(values[i], i));
    }
    for (int64_t i = k; k && i < n;) {
        float floor = values[place_of(heap[0])];
        int64_t end = i + BLOCK;
        while (end <= n) {
            int any = 0;
            for (int j = 0; j < BLOCK; j++) {
                any |= values[i + j] > floor;
            }
            if (any) {
                break;
            }
            i = end;
            end += BLOCK;
        }
        for (end = end < n ? end : n; i < end; i++) {
            if (values[i] > values[place_of(heap[0])]) {
                sink(heap, k, 0, ranked(values[i], i));
            }
        }
    }
    for (int64_t left = k - 1; left >= 0; left--) {  /* the lowest is the last */
        uint64_t lowest = heap[0];
        sink(heap, left, 0, heap[left]);
        places[left] = place_of(lowest);
    }
}

/* The place of the first NaN, or else of the largest of n values, the lowest among equals; 0 < n. */
static int64_t argmax(const float * values, int64_t n) {
    enum { BLOCK = 32 };  /* looked at together, as above */
    int64_t best = 0;
    for (int64_t i = 0; i < n && values[best] == values[best];) {
        int64_t end = i + BLOCK < n ? i + BLOCK : n;
        int any = end < i + BLOCK;
        for (int j = 0; j < BLOCK && end == i + BLOCK; j++) {
            any |= !(values[i + j] <= values[best]);
        }
        for (; any && i < end && values[best] == values[best]; i++) {
            if (!(values[i] <= values[best])) {
                best = i;
            }
        }
        i = end;
    }
    return best;
}

struct rows { const float ** values; int64_t n, size; int64_t * places; };

static void argmax_of_some(struct ggml_tensor * unused, int ith, int nth, void * data) {
    struct rows * rows = (struct rows *) data;
    (void) unused;
    for (int64_t i = ith; i < rows->n; i += nth) {
        rows->places[i] = argmax(rows->values[i], rows->size);
    }
}

/* `argmax` of each of n rows, which the threads of a CPU backend share as a graph of one node. False if that failed. */
static bool ggufpy_argmax(ggml_backend_t cpu, const float ** values, int64_t n, int64_t size, int64_t * places) {
    struct rows rows = { values, n, size, places };
    struct ggml_init_params params = { ggml_tensor_overhead() + ggml_graph_overhead_custom(1, false), NULL, true };
    struct ggml_context * ctx = ggml_init(params);
    if (!ctx) {
        return false;
    }
    struct ggml_cgraph * graph = ggml_new_graph_custom(ctx, 1, false);
    struct ggml_tensor * node =
        ggml_custom_4d(ctx, GGML_TYPE_I32, 1, 1, 1, 1, NULL, 0, argmax_of_some, GGML_N_TASKS_MAX, &rows);
    node->data = places;
    ggml_build_forward_expand(graph, node);
    bool done = ggml_backend_graph_compute(cpu, graph) == GGML_STATUS_SUCCESS;
    ggml_free(ctx);
    return done;
}

/* --- exponentials, logarithms and sums ------------------------------------------------------------------------ */

/* exp(logit - peak), by the C library's own expf, as llama.cpp's. */
static void ggufpy_exponentials(const float * logits, int64_t n, float peak, float * result) {
    for (int64_t i = 0; i < n; i++) {
        result[i] = expf(logits[i] - peak);
    }
}

/* The C library's logf, log2f and powf, which do not always give the nearest float. */
static void ggufpy_logarithms(const float * values, int64_t n, float * result) {
    for (int64_t i = 0; i < n; i++) {
        result[i] = logf(values[i]);
    }
}

static void ggufpy_binary_logarithms(const float * values, int64_t n, float * result) {
    for (int64_t i = 0; i < n; i++) {
        result[i] = log2f(values[i]);
    }
}

static float ggufpy_power(float base, float exponent) { return powf(base, exponent); }

/* Logits, of which the largest is the peak, by a divisor; where that overflows only differences count. */
static void ggufpy_divide(const float * logits, int64_t n, float peak, float divisor, float * result) {
    float base = isfinite(peak / divisor) ? 0 : peak;
    for (int64_t i = 0; i < n; i++) {
        result[i] = (logits[i] - base) / divisor;
    }
}

static float ggufpy_sum(const float * values, int64_t n) {
    float sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += values[i];
    }
    return sum;
}

/* The standard deviation of the logits above -inf. */
static float ggufpy_deviation(const float * logits, int64_t n) {
    float sum = 0, squares = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        if (logits[i] > -INFINITY) {
            sum += logits[i];
            count++;
        }
    }
    float mean = sum / (float) count;
    for (int64_t i = 0; i < n; i++) {
        if (logits[i] > -INFINITY) {
            double distance = logits[i] - mean;
            squares += distance * distance;  /* rounded once, with the sum */
        }
    }
    return sqrtf(squares / (float) count);
}

static void ggufpy_softmax(const float * logits, int64_t n, float peak, float * result) {
    ggufpy_exponentials(logits, n, peak, result);
    float sum = ggufpy_sum(result, n);
    for (int64_t i = 0; i < n; i++) {
        result[i] /= sum;
    }
}

/* How many shares reach, or exceed, `enough`; n + 1 where all together do not. */
static int64_t ggufpy_reach(const float * shares, int64_t n, float enough, bool exceed) {
    float sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += shares[i];
        if (exceed ? sum > enough : sum >= enough) {
            return i + 1;
        }
    }
    return n + 1;
}

/* The least logit that is `share` times as probable as the peak. */
static float ggufpy_floor(float peak, float share) { return peak + logf(share); }

/* How many logits, the largest first, are at least `share` times as probable as that one, the peak; 1 or more. */
static int64_t ggufpy_at_least(const float * logits, int64_t n, float peak, float share) {
    float floor = ggufpy_floor(peak, share);
    int64_t kept = 1;
    while (kept < n && logits[kept] >= floor) {
        kept++;
    }
    return kept;
}

/* The place that u, from 0 to 1, falls on when the logits' weights, of which it writes down each, lie side by side. */
static int64_t ggufpy_draw(const float * logits, int64_t n, float peak, double u, float * weights) {
    ggufpy_exponentials(logits, n, peak, weights);
    double sum = 0, running = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += weights[i];
    }
    for (int64_t i = 0; i < n; i++) {
        running += weights[i];
        if (running >= sum * u) {
            return i;
        }
    }
    return n - 1;
}

/* top_k, top_p, min_p, temperature and a draw; the row has a largest logit, which is finite. 0 < k <= n and FEW. */
static int64_t ggufpy_draw_likeliest(const float * row, int64_t n, int64_t k, float top_p, float min_p, float temperature,
                                     double u) {
    int64_t places[GGUFPY_FEW];
    float logits[GGUFPY_FEW], weights[GGUFPY_FEW];
    ggufpy_largest(row, n, k, places);
    for (int64_t i = 0; i < k; i++) {
        logits[i] = row[places[i]];
    }
    if (top_p < 1) {
        ggufpy_softmax(logits, k, logits[0], weights);
        int64_t kept = ggufpy_reach(weights, k, top_p, false);
        k = kept < k ? kept : k;
    }
    if (min_p > 0) {
        k = ggufpy_at_least(logits, k, logits[0], min_p);
    }
    ggufpy_divide(logits, k, logits[0], temperature, logits);
    return places[ggufpy_draw(logits, k, logits[0], u, weights)];
}
