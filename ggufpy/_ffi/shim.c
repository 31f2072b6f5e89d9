/* Owns the few C functions ggufpy adds beside ggml: loading libraries, CPU identification, and the registry
   procedures of a backend behind plain functions. It is compiled into the cffi module; decl/shim.h declares it. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <dlfcn.h>

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

/* 0: this CPU lacks something the library needs. -1: the library does not say. */
static int ggufpy_backend_score(void * library) {
    int (*score)(void) = (int (*)(void)) dlsym(library, "ggml_backend_score");
    return score ? score() : -1;
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

static bool ggufpy_dev_is_numa(ggml_backend_dev_t device) {
    bool (*proc)(void) = (bool (*)(void)) ggufpy_dev_proc(device, "ggml_backend_cpu_is_numa");
    return proc && proc();
}

/* --- graphs -------------------------------------------------------------------------------------------------- */

/* The first node that none of the backends can compute (ggml would abort on it), or NULL. */
static struct ggml_tensor * ggufpy_graph_first_unsupported(
        struct ggml_cgraph * graph, ggml_backend_t * backends, int n) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        struct ggml_tensor * node = ggml_graph_node(graph, i);
        int k = 0;
        while (k < n && !ggml_backend_supports_op(backends[k], node)) {
            k++;
        }
        if (k == n) {
            return node;
        }
    }
    return NULL;
}

/* --- callbacks ----------------------------------------------------------------------------------------------- */

/* Takes over from the Python log callback while the interpreter shuts down. */
static void ggufpy_log_discard(enum ggml_log_level level, const char * text, void * user_data) {
    (void) level; (void) text; (void) user_data;
}
