/* Owns the few C functions ggufpy adds beside ggml: loading libraries, CPU identification, and the registry
   procedures of a backend behind plain functions. It is compiled into the cffi module; decl/shim.h declares it. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#ifndef RTLD_DEEPBIND
#define RTLD_DEEPBIND 0
#endif

/* --- loading ------------------------------------------------------------------------------------------------- */

/* ggml's own loader opens without RTLD_DEEPBIND; the flags of the first opening are the ones that last. */
static void * ggufpy_dlopen(const char * path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND); }

static const char * ggufpy_dlerror(void) { return dlerror(); }

/* ggml's score of a backend library for this machine; 0 if it cannot run here, -1 if it does not say. The library is
   not kept. */
static int ggufpy_backend_score(const char * path) {
    void * library = dlopen(path, RTLD_LAZY | RTLD_LOCAL | RTLD_DEEPBIND);
    if (!library) {
        return 0;
    }
    int (*score)(void) = (int (*)(void)) dlsym(library, "ggml_backend_score");
    int result = score ? score() : -1;
    dlclose(library);
    return result;
}

static void ggufpy_cpuid(uint32_t leaf, uint32_t subleaf, uint32_t registers[4]) {
#if defined(__x86_64__)
    if (__get_cpuid_count(leaf, subleaf, &registers[0], &registers[1], &registers[2], &registers[3])) {
        return;
    }
#endif
    memset(registers, 0, 4 * sizeof(uint32_t));
}

/* Which register sets the operating system saves (XCR0); 0 where that cannot be asked. */
static uint64_t ggufpy_xcr0(void) {
#if defined(__x86_64__)
    uint32_t a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 27))) {
        __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
        return ((uint64_t) d << 32) | a;
    }
#endif
    return 0;
}

static const char * ggufpy_build_record(void) { return GGUFPY_BUILD_RECORD; }

/* --- registry procedures ------------------------------------------------------------------------------------- */

static void * ggufpy_dev_proc(ggml_backend_dev_t device, const char * name) {
    ggml_backend_reg_t reg = device ? ggml_backend_dev_backend_reg(device) : NULL;
    return reg ? ggml_backend_reg_get_proc_address(reg, name) : NULL;
}

static void * ggufpy_backend_proc(ggml_backend_t backend, const char * name) {
    return ggufpy_dev_proc(ggml_backend_get_device(backend), name);
}

static bool ggufpy_backend_set_n_threads(ggml_backend_t backend, int n_threads) {
    ggml_backend_set_n_threads_t proc =
        (ggml_backend_set_n_threads_t) ggufpy_backend_proc(backend, "ggml_backend_set_n_threads");
    if (proc) { proc(backend, n_threads); }
    return proc != NULL;
}

static bool ggufpy_backend_set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data) {
    ggml_backend_set_abort_callback_t proc =
        (ggml_backend_set_abort_callback_t) ggufpy_backend_proc(backend, "ggml_backend_set_abort_callback");
    if (proc) { proc(backend, callback, data); }
    return proc != NULL;
}

static bool ggufpy_backend_set_use_ref(ggml_backend_t backend, bool use_ref) {
    void (*proc)(ggml_backend_t, bool) =
        (void (*)(ggml_backend_t, bool)) ggufpy_backend_proc(backend, "ggml_backend_cpu_set_use_ref");
    if (proc) { proc(backend, use_ref); }
    return proc != NULL;
}

static bool ggufpy_backend_set_threadpool(ggml_backend_t backend, ggml_threadpool_t pool) {
    void (*proc)(ggml_backend_t, ggml_threadpool_t) =
        (void (*)(ggml_backend_t, ggml_threadpool_t)) ggufpy_backend_proc(backend, "ggml_backend_cpu_set_threadpool");
    if (proc) { proc(backend, pool); }
    return proc != NULL;
}

static ggml_threadpool_t ggufpy_threadpool_new(ggml_backend_dev_t device, struct ggml_threadpool_params * params) {
    ggml_threadpool_t (*proc)(struct ggml_threadpool_params *) =
        (ggml_threadpool_t (*)(struct ggml_threadpool_params *)) ggufpy_dev_proc(device, "ggml_threadpool_new");
    return proc ? proc(params) : NULL;
}

static bool ggufpy_threadpool_free(ggml_backend_dev_t device, ggml_threadpool_t pool) {
    void (*proc)(ggml_threadpool_t) = (void (*)(ggml_threadpool_t)) ggufpy_dev_proc(device, "ggml_threadpool_free");
    if (proc) { proc(pool); }
    return proc != NULL;
}

/* NULL, or an array that ends with NULL. */
static ggml_backend_buffer_type_t * ggufpy_dev_extra_bufts(ggml_backend_dev_t device) {
    ggml_backend_dev_get_extra_bufts_t proc =
        (ggml_backend_dev_get_extra_bufts_t) ggufpy_dev_proc(device, "ggml_backend_dev_get_extra_bufts");
    return proc ? proc(device) : NULL;
}

/* NULL, or an array that ends with a NULL name. */
static struct ggml_backend_feature * ggufpy_reg_features(ggml_backend_reg_t reg) {
    ggml_backend_get_features_t proc =
        (ggml_backend_get_features_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features");
    return proc ? proc(reg) : NULL;
}

/* --- tensors and graphs --------------------------------------------------------------------------------------- */

/* What a Tensor of graph/ keeps, in one call: ne, nb, type, and the layout flags of graph/tensor.py. */
static void ggufpy_describe(const struct ggml_tensor * t, int64_t out[10]) {
    for (int i = 0; i < 4; i++) {
        out[i] = t->ne[i];
        out[4 + i] = (int64_t) t->nb[i];
    }
    out[8] = t->type;
    out[9] = (ggml_is_contiguous(t) ? 1 : 0) | (ggml_is_contiguous_1(t) ? 2 : 0) |
             (t->nb[0] == ggml_type_size(t->type) ? 4 : 0) |
             (t->nb[2] == t->nb[1] * t->ne[1] && t->nb[3] == t->nb[2] * t->ne[2] ? 8 : 0);
}

/* ggml_build_forward_expand, but a graph of any depth needs no more stack than another: every source is expanded
   before what it is a source of, in the order in which ggml itself would come to them. A node that ggml has taken
   carries the flag COMPUTE. Returns false if memory ran out. */
static bool ggufpy_expand(struct ggml_cgraph * graph, struct ggml_tensor * tensor) {
    struct frame { struct ggml_tensor * node; int next; };
    size_t depth = 1, room = 256;
    struct frame * stack = (struct frame *) malloc(room * sizeof(struct frame));
    if (!stack) { return false; }
    stack[0].node = tensor;
    stack[0].next = 0;
    while (depth) {
        struct frame * top = &stack[depth - 1];
        struct ggml_tensor * source = NULL;
        while (top->next < GGML_MAX_SRC && !source) {
            source = top->node->src[top->next++];
            if (source == top->node || (source && (source->flags & GGML_TENSOR_FLAG_COMPUTE))) {
                source = NULL;  /* ggml_cast names its result as a source of itself */
            }
        }
        if (!source) {
            ggml_build_forward_expand(graph, top->node);
            depth--;
            continue;
        }
        if (depth == room) {
            room *= 2;
            struct frame * larger = (struct frame *) realloc(stack, room * sizeof(struct frame));
            if (!larger) {
                free(stack);
                return false;
            }
            stack = larger;
        }
        stack[depth].node = source;
        stack[depth++].next = 0;
    }
    free(stack);
    return true;
}

static bool ggufpy_can_run(const struct ggml_tensor * node, ggml_backend_t * backends, int n) {
    const struct ggml_tensor * owner = node->view_src ? node->view_src : node;
    for (int i = 0; i < n; i++) {
        bool reaches = !owner->buffer || ggml_backend_supports_buft(backends[i], ggml_backend_buffer_get_type(owner->buffer));
        if (reaches && ggml_backend_supports_op(backends[i], node)) {
            return true;
        }
    }
    return false;
}

/* The first node, or source of one, that none of the backends can compute where its data lies (the scheduler would
   abort on it), or NULL. Leaves without memory become inputs on the way: only those are sure to be given a backend. */
static struct ggml_tensor * ggufpy_graph_first_unsupported(
        struct ggml_cgraph * graph, ggml_backend_t * backends, int n) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        struct ggml_tensor * node = ggml_graph_node(graph, i);
        if (!ggufpy_can_run(node, backends, n)) {
            return node;
        }
        for (int k = 0; k < GGML_MAX_SRC; k++) {
            struct ggml_tensor * source = node->src[k];
            if (!source || source->op != GGML_OP_NONE) {
                continue;
            }
            if (!ggufpy_can_run(source, backends, n)) {
                return source;
            }
            if (!source->buffer) {
                ggml_set_input(source);
            }
        }
    }
    return NULL;
}

/* ggml's graph allocator keeps at most 256 holes between live tensors, and aborts on one more. This bounds how many
   there can be at any node: no more than live tensors and one, no more than two for each tensor that has died.
   `memory` is where the n tensors of the graph's context lie, one after the other; those of other contexts have
   buffers of their own. Returns -1 if memory ran out. */
static int ggufpy_graph_max_holes(struct ggml_cgraph * graph, const void * memory, int n) {
    int * last = (int *) malloc((size_t) n * sizeof(int));
    if (!last) { return -1; }
    for (int i = 0; i < n; i++) {
        last[i] = -1;
    }
    int n_nodes = ggml_graph_n_nodes(graph);
    int live = 0, dead = 0, holes = 0;
    for (int pass = 0; pass < 2; pass++) {  /* first find each tensor's last use, then follow them living and dying */
        for (int i = 0; i < n_nodes; i++) {
            struct ggml_tensor * node = ggml_graph_node(graph, i);
            for (int k = -1; k < GGML_MAX_SRC; k++) {
                struct ggml_tensor * t = k < 0 ? node : node->src[k];
                t = t && t->view_src ? t->view_src : t;
                if (!t || t->buffer) { continue; }
                int at = (int) ((size_t) ((const char *) t - (const char *) memory) / ggml_tensor_overhead());
                if (pass == 0) {
                    live += last[at] < 0 && t->op == GGML_OP_NONE;
                    last[at] = i;
                } else if (t == node) {
                    live++;
                }
                if (pass == 1 && last[at] == i && !(t->flags & GGML_TENSOR_FLAG_OUTPUT)) {
                    last[at] = n_nodes;
                    live--;
                    dead++;
                }
            }
            int most = live + 1 < 2 * dead ? live + 1 : 2 * dead;
            holes = pass == 1 && most > holes ? most : holes;
        }
    }
    free(last);
    return holes;
}

static int64_t ggufpy_row_number(const struct ggml_tensor * t, const char * at) {
    if (t->type == GGML_TYPE_I64) {
        int64_t value;
        memcpy(&value, at, sizeof value);
        return value;
    }
    int32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* Looks for a value outside 0 ... limits[i] - 1 in each of n tensors of type I32 or I64 that have memory; those
   without are not part of the graph. Returns -1 if there is none, -2 if memory ran out, or else the number of the
   tensor, with the value in *bad. */
static int ggufpy_first_bad_row(struct ggml_tensor ** tensors, const int64_t * limits, int n, int64_t * bad) {
    for (int i = 0; i < n; i++) {
        const struct ggml_tensor * t = tensors[i];
        const struct ggml_tensor * owner = t->view_src ? t->view_src : t;
        if (!t->data || !owner->buffer) {
            continue;
        }
        char * copy = NULL;
        const char * data = (const char *) t->data;
        if (!ggml_backend_buffer_is_host(owner->buffer)) {
            copy = (char *) malloc(ggml_nbytes(t));
            if (!copy) { return -2; }
            ggml_backend_tensor_get(t, copy, 0, ggml_nbytes(t));
            data = copy;
        }
        int found = -1;
        for (int64_t i3 = 0; i3 < t->ne[3] && found < 0; i3++) {
            for (int64_t i2 = 0; i2 < t->ne[2] && found < 0; i2++) {
                for (int64_t i1 = 0; i1 < t->ne[1] && found < 0; i1++) {
                    const char * row = data + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
                    for (int64_t i0 = 0; i0 < t->ne[0]; i0++) {
                        int64_t value = ggufpy_row_number(t, row + i0 * t->nb[0]);
                        if (value < 0 || value >= limits[i]) {
                            *bad = value;
                            found = i;
                            break;
                        }
                    }
                }
            }
        }
        free(copy);
        if (found >= 0) {
            return found;
        }
    }
    return -1;
}

/* Writes the attention mask of n tokens of one sequence, F16 or F32: rows of n_cells, a cell's value being 0, or with
   `alibi` minus its distance, where the sequence has the cell and the token sees its position, and -inf elsewhere. A
   token sees from `before` positions before its own, or from the start of its chunk, to `after` positions behind. */
static void ggufpy_write_mask(void * mask, bool f16, const int32_t * cells, const bool * has, int64_t n_cells,
                              const int32_t * positions, int64_t n, int64_t before, int64_t after, int64_t chunk, bool alibi) {
    for (int64_t i = 0; i < n; i++) {
        int64_t position = positions[i];
        int64_t first = chunk ? position / chunk * chunk : position - before, last = position + after;
        int32_t low = (int32_t) (first < 0 ? 0 : first), high = (int32_t) (last > INT32_MAX ? INT32_MAX : last);
        ggml_fp16_t * half = (ggml_fp16_t *) mask + i * n_cells;
        float * full = (float *) mask + i * n_cells;
        for (int64_t k = 0; k < n_cells; k++) {
            bool seen = has[k] & (cells[k] >= low) & (cells[k] <= high);
            if (alibi) {
                float value = seen ? -fabsf((float) (cells[k] - positions[i])) : -INFINITY;
                if (f16) { half[k] = ggml_fp32_to_fp16(value); } else { full[k] = value; }
            } else if (f16) {
                half[k] = seen ? 0 : 0xFC00;
            } else {
                full[k] = seen ? 0.0f : -INFINITY;
            }
        }
    }
}

/* --- callbacks ----------------------------------------------------------------------------------------------- */

/* An abort callback that needs no Python: `data` is an int that anybody sets to stop the compute. */
static bool ggufpy_stop(void * data) { return *(volatile int *) data != 0; }

/* Takes over from the Python log callback while the interpreter shuts down. */
static void ggufpy_log_discard(enum ggml_log_level level, const char * text, void * user_data) {
    (void) level; (void) text; (void) user_data;
}
