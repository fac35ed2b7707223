/* The embedded CPython (see template.h). The only file that knows Python.
 *
 * One thread owns the interpreter and takes jobs from a queue. A caller that waits is also the
 * watchdog of its job: when the time is over it raises TimeoutError inside the render thread. Which
 * job runs is only changed with the GIL held, so that the exception cannot hit the next one.
 * Python's raw allocator is wrapped to count bytes, and refuses the render thread more than its
 * bound: Python then raises MemoryError. The thread lives until nbi_python_stop(); what it leaves
 * in memory, the process's end takes. */
#include "text/template.h"

#if !NBI_WITH_PYTHON

nb_status nbi_python_render(const nbi_template_text *text, const char *context, size_t n,
                            nbi_buf *out, nb_error *err)
{
    (void)text, (void)context, (void)n, (void)out;
    return nbi_fail(
        err, NB_UNSUPPORTED,
        "this nibble was built without Python (python3-dev), which chat templates need");
}

void nbi_python_warm(const nbi_template_text *text)
{
    (void)text;
}

void nbi_python_forget(uint64_t id)
{
    (void)id;
}

bool nbi_python_stop(uint32_t wait_ms)
{
    (void)wait_ms;
    return true;
}

#else

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "text/template_env.h"

/* Decides where the standard library is looked for; PATH must not. */
#ifndef NBI_PYTHON_PROGRAM
#define NBI_PYTHON_PROGRAM L"/usr/bin/python3"
#endif
#define THREAD_STACK_BYTES ((size_t)16 << 20)
#define JOB_NS             ((uint64_t)NBI_TEMPLATE_SECONDS * 1000000000u)
#define WALL_NS            ((uint64_t)NBI_TEMPLATE_WALL_SECONDS * 1000000000u)

typedef enum job_kind { JOB_RENDER, JOB_WARM, JOB_FORGET } job_kind;

/* A render lives on its caller's stack; the others are on the heap and freed by the render thread.
 */
typedef struct job {
    struct job *next;
    job_kind kind;
    nbi_template_text text;
    const char *context;
    size_t n_context;
    nbi_buf *out;
    nb_error err;
    nb_status status;
    uint64_t started_ns;     /* 0: still in the queue */
    uint64_t started_cpu_ns; /* the render thread's own time then */
    bool done, timed_out;
    char *owned; /* source and variables of a JOB_WARM */
} job;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work, changed;
    job *head, **tail;
    pthread_t thread;
    bool started, stopping, ended;
    /* written with the GIL held */
    const job *running;
    unsigned long thread_id;
} py = {.lock = PTHREAD_MUTEX_INITIALIZER,
        .work = PTHREAD_COND_INITIALIZER,
        .changed = PTHREAD_COND_INITIALIZER,
        .tail = &py.head};

/* ---------------------------------------------------------------- allocator */

static atomic_size_t heap_bytes;
static _Thread_local size_t heap_limit; /* 0: none */
static PyMemAllocatorEx raw;
static PyObjectArenaAllocator arenas;

static bool over_limit(size_t more)
{
    return heap_limit &&
           (more > heap_limit ||
            atomic_load_explicit(&heap_bytes, memory_order_relaxed) > heap_limit - more);
}

static void *counted(void *p)
{
    if (p) atomic_fetch_add_explicit(&heap_bytes, malloc_usable_size(p), memory_order_relaxed);
    return p;
}

static void *raw_malloc(void *ctx, size_t n)
{
    (void)ctx;
    return over_limit(n) ? NULL : counted(raw.malloc(raw.ctx, n));
}

static void *raw_calloc(void *ctx, size_t n, size_t size)
{
    (void)ctx;
    return (size && n > SIZE_MAX / size) || over_limit(n * size)
               ? NULL
               : counted(raw.calloc(raw.ctx, n, size));
}

static void raw_free(void *ctx, void *p)
{
    (void)ctx;
    if (p) atomic_fetch_sub_explicit(&heap_bytes, malloc_usable_size(p), memory_order_relaxed);
    raw.free(raw.ctx, p);
}

static void *raw_realloc(void *ctx, void *p, size_t n)
{
    (void)ctx;
    size_t before = p ? malloc_usable_size(p) : 0;
    if (n > before && over_limit(n - before)) return NULL;
    void *q = raw.realloc(raw.ctx, p, n);
    if (q) atomic_fetch_sub_explicit(&heap_bytes, before, memory_order_relaxed);
    return counted(q);
}

static void *arena_alloc(void *ctx, size_t n)
{
    (void)ctx;
    void *p = over_limit(n) ? NULL : arenas.alloc(arenas.ctx, n);
    if (p) atomic_fetch_add_explicit(&heap_bytes, n, memory_order_relaxed);
    return p;
}

static void arena_free(void *ctx, void *p, size_t n)
{
    (void)ctx;
    atomic_fetch_sub_explicit(&heap_bytes, n, memory_order_relaxed);
    arenas.free(arenas.ctx, p, n);
}

static void wrap_allocators(void)
{
    PyMemAllocatorEx mine = {NULL, raw_malloc, raw_calloc, raw_realloc, raw_free};
    PyObjectArenaAllocator my_arenas = {NULL, arena_alloc, arena_free};
    PyMem_GetAllocator(PYMEM_DOMAIN_RAW, &raw);
    PyMem_SetAllocator(PYMEM_DOMAIN_RAW, &mine);
    PyObject_GetArenaAllocator(&arenas);
    PyObject_SetArenaAllocator(&my_arenas);
}

/* ---------------------------------------------------------------- interpreter */

static nb_status start_python(nb_error *err)
{
    PyPreConfig pre;
    PyPreConfig_InitIsolatedConfig(&pre);
    pre.utf8_mode = 1;
    PyStatus status = Py_PreInitialize(&pre);
    if (!PyStatus_Exception(status)) {
        wrap_allocators();
        PyConfig config;
        PyConfig_InitIsolatedConfig(&config);
        config.site_import = 0;
        config.install_signal_handlers = 0;
        config.write_bytecode = 0;
        config.pathconfig_warnings = 0;
        status = PyConfig_SetString(&config, &config.program_name, NBI_PYTHON_PROGRAM);
        if (!PyStatus_Exception(status)) status = Py_InitializeFromConfig(&config);
        PyConfig_Clear(&config);
    }
    if (PyStatus_Exception(status))
        return nbi_fail(err, NB_UNSUPPORTED, "the embedded Python does not start: %s",
                        status.err_msg ? status.err_msg : "no reason");
    return NB_OK;
}

/* Takes the pending exception's message; `describe` may be NULL before the environment is there. */
static void exception_text(PyObject *describe, char *text, size_t cap, bool *memory)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    *memory = type && PyErr_GivenExceptionMatches(type, PyExc_MemoryError);
    PyObject *bytes = NULL;
    if (value && describe)
        bytes = PyObject_CallFunctionObjArgs(describe, value, NULL);
    else if (value) {
        PyObject *string = PyObject_Str(value);
        bytes = string ? PyUnicode_AsUTF8String(string) : NULL;
        Py_XDECREF(string);
    }
    PyErr_Clear();
    snprintf(text, cap, "%s", bytes ? PyBytes_AsString(bytes) : "unknown error");
    Py_XDECREF(bytes);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

/* Runs the environment's source; a new reference to its namespace, NULL with *err. */
static PyObject *make_environment(nb_error *err)
{
    PyObject *space = PyDict_New(), *result = NULL;
    if (space && PyDict_SetItemString(space, "__builtins__", PyEval_GetBuiltins()) == 0 &&
        PyDict_SetItemString(space, "__name__", Py_None) == 0)
        result = PyRun_String(NBI_PYTHON_ENV, Py_file_input, space, space);
    if (result) {
        Py_DECREF(result);
        return space;
    }
    char text[256];
    bool memory;
    exception_text(NULL, text, sizeof text, &memory);
    (void)nbi_fail(err, NB_UNSUPPORTED,
                   "chat templates need Jinja2 for the system's Python (python3-jinja2): %s", text);
    Py_XDECREF(space);
    return NULL;
}

/* ---------------------------------------------------------------- jobs, in the render thread with
 * the GIL */

static PyObject *call_python(PyObject *space, const job *j)
{
    const nbi_template_text *t = &j->text;
    if (j->kind == JOB_FORGET)
        return PyObject_CallFunction(PyDict_GetItemString(space, "forget"), "K",
                                     (unsigned long long)t->id);
    if (j->kind == JOB_WARM)
        return PyObject_CallFunction(PyDict_GetItemString(space, "prepare"), "Ky#s",
                                     (unsigned long long)t->id, t->source, (Py_ssize_t)t->n_source,
                                     t->variables);
    return PyObject_CallFunction(PyDict_GetItemString(space, "render"), "Ky#sy#",
                                 (unsigned long long)t->id, t->source, (Py_ssize_t)t->n_source,
                                 t->variables, j->context, (Py_ssize_t)j->n_context);
}

static void take_result(job *j, PyObject *result)
{
    char *text;
    Py_ssize_t n;
    if (j->kind != JOB_RENDER) return;
    if (PyBytes_AsStringAndSize(result, &text, &n) != 0) {
        PyErr_Clear();
        j->status = nbi_fail(&j->err, NB_INTERNAL, "the chat template gave no text");
    } else if ((size_t)n > NBI_TEMPLATE_OUTPUT_BYTES) {
        j->status = nbi_fail(&j->err, NB_TOO_LARGE,
                             "the chat template renders to %zd bytes, at most %zu are allowed", n,
                             NBI_TEMPLATE_OUTPUT_BYTES);
    } else {
        j->status = nbi_buf_add(j->out, text, (size_t)n);
        if (j->status != NB_OK)
            (void)nbi_fail(&j->err, j->status, "no room for %zd bytes of rendered chat template",
                           n);
    }
}

static void take_exception(job *j, PyObject *space)
{
    char text[384];
    bool memory;
    exception_text(PyDict_GetItemString(space, "describe"), text, sizeof text, &memory);
    if (j->timed_out)
        j->status = nbi_fail(&j->err, NB_TOO_LARGE, "the chat template ran longer than %d s",
                             NBI_TEMPLATE_SECONDS);
    else if (memory)
        j->status =
            nbi_fail(&j->err, NB_TOO_LARGE, "the chat template needed more than %zu MiB of memory",
                     NBI_TEMPLATE_HEAP_BYTES >> 20);
    else
        j->status = nbi_fail(&j->err, NB_INVALID, "chat template: %s", text);
}

static void run_job(PyObject *space, job *j)
{
    (void)PyThreadState_SetAsyncExc(py.thread_id,
                                    NULL); /* one that came too late for the job before */
    py.running = j;
    heap_limit = atomic_load_explicit(&heap_bytes, memory_order_relaxed) + NBI_TEMPLATE_HEAP_BYTES;
    PyObject *result = call_python(space, j);
    heap_limit = 0;
    py.running = NULL;
    if (result)
        take_result(j, result);
    else
        take_exception(j, space);
    Py_XDECREF(result);
}

/* Time of a processor that the render thread has taken, from any thread. With the lock held. */
static uint64_t render_cpu_ns(void)
{
    clockid_t clock;
    struct timespec t;
    if (pthread_getcpuclockid(py.thread, &clock) != 0 || clock_gettime(clock, &t) != 0) return 0;
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* What is left of the job's time; 0: nothing. With the lock held. */
static uint64_t left_ns(const job *j)
{
    if (!j->started_ns) return JOB_NS;
    uint64_t wall = nbi_now_ns() - j->started_ns, cpu = render_cpu_ns() - j->started_cpu_ns;
    if (wall >= WALL_NS || cpu >= JOB_NS) return 0;
    return WALL_NS - wall < JOB_NS - cpu ? WALL_NS - wall : JOB_NS - cpu;
}

/* NULL when the thread is to end. Without the GIL: the lock may be held by a caller that waits for
 * it. */
static job *next_job(void)
{
    pthread_mutex_lock(&py.lock);
    while (!py.head && !py.stopping) pthread_cond_wait(&py.work, &py.lock);
    job *j = py.head;
    if (!j) {
        py.ended = true;
        pthread_cond_broadcast(&py.changed);
        pthread_mutex_unlock(&py.lock);
        return NULL;
    }
    py.head = j->next;
    if (!py.head) py.tail = &py.head;
    j->started_ns = nbi_now_ns();
    j->started_cpu_ns = render_cpu_ns();
    pthread_cond_broadcast(&py.changed);
    pthread_mutex_unlock(&py.lock);
    return j;
}

static void end_job(job *j)
{
    if (j->kind != JOB_RENDER) {
        nbi_free(j->owned);
        nbi_free(j);
        return;
    }
    pthread_mutex_lock(&py.lock);
    j->done = true;
    pthread_cond_broadcast(&py.changed);
    pthread_mutex_unlock(&py.lock);
}

static void *render_thread(void *arg)
{
    (void)arg;
    nb_error err = {.status = NB_OK};
    PyObject *space = NULL;
    bool running = start_python(&err) == NB_OK;
    uint64_t start_ns = nbi_now_ns();
    if (running) {
        py.thread_id = PyThread_get_thread_ident();
        space = make_environment(&err);
    }
    PyThreadState *state = running ? PyEval_SaveThread() : NULL;
    nbi_log(NB_LOG_DEBUG, "chat templates: Jinja2 %s after %.0f ms", space ? "ready" : "failed",
            (double)(nbi_now_ns() - start_ns) * 1e-6);
    for (job *j; (j = next_job());) {
        if (space) {
            PyEval_RestoreThread(state);
            run_job(space, j);
            state = PyEval_SaveThread();
        } else {
            j->err = err;
            j->status = err.status;
        }
        end_job(j);
    }
    return NULL;
}

/* ---------------------------------------------------------------- callers */

/* With the lock held. */
static nb_status start_thread(nb_error *err)
{
    if (py.started) return NB_OK;
    pthread_attr_t attr;
    if (py.stopping) return nbi_fail(err, NB_CLOSED, "chat templates have been stopped");
    int rc = pthread_attr_init(&attr);
    if (rc == 0) {
        (void)pthread_attr_setstacksize(&attr, THREAD_STACK_BYTES);
        rc = pthread_create(&py.thread, &attr, render_thread, NULL);
        pthread_attr_destroy(&attr);
    }
    if (rc != 0)
        return nbi_fail(err, NB_NO_MEMORY, "cannot start the thread for chat templates: %s",
                        strerror(rc));
    py.started = true;
    return NB_OK;
}

/* With the lock held. */
static void enqueue(job *j)
{
    j->next = NULL;
    *py.tail = j;
    py.tail = &j->next;
    pthread_cond_signal(&py.work);
}

/* Raises TimeoutError in the render thread if `j` is still what runs there. Called without the
 * lock. */
static void interrupt(job *j)
{
    PyGILState_STATE state = PyGILState_Ensure();
    if (py.running == j) {
        j->timed_out = true;
        (void)PyThreadState_SetAsyncExc(py.thread_id, PyExc_TimeoutError);
    }
    PyGILState_Release(state);
}

/* Until something changed, or for that long, whatever happens to the time of day. With the lock
 * held. */
static void wait_changed(uint64_t ns)
{
    struct timespec until = nbi_timespec(nbi_now_ns() + ns);
    (void)pthread_cond_clockwait(&py.changed, &py.lock, CLOCK_MONOTONIC, &until);
}

static void wait_for(job *j)
{
    pthread_mutex_lock(&py.lock);
    while (!j->done) {
        uint64_t left = left_ns(j);
        if (!left) {
            pthread_mutex_unlock(&py.lock);
            interrupt(
                j); /* again and again: a template cannot catch it, but a late one may be lost */
            pthread_mutex_lock(&py.lock);
            if (j->done) break;
            left = JOB_NS / 20;
        }
        wait_changed(left);
    }
    pthread_mutex_unlock(&py.lock);
}

nb_status nbi_python_render(const nbi_template_text *text, const char *context, size_t n,
                            nbi_buf *out, nb_error *err)
{
    job j = {.kind = JOB_RENDER, .text = *text, .context = context, .n_context = n, .out = out};
    pthread_mutex_lock(&py.lock);
    nb_status st = start_thread(err);
    if (st == NB_OK) enqueue(&j);
    pthread_mutex_unlock(&py.lock);
    if (st != NB_OK) return st;
    wait_for(&j);
    if (j.status != NB_OK && err) *err = j.err;
    return j.status;
}

void nbi_python_warm(const nbi_template_text *text)
{
    job *j = NULL;
    if (text && (j = nbi_calloc(1, sizeof *j))) {
        size_t n_variables = strlen(text->variables) + 1;
        j->kind = JOB_WARM;
        j->text = *text;
        j->owned = nbi_malloc(text->n_source + n_variables);
        if (j->owned) {
            memcpy(j->owned, text->source, text->n_source);
            memcpy(j->owned + text->n_source, text->variables, n_variables);
            j->text.source = j->owned;
            j->text.variables = j->owned + text->n_source;
        } else {
            nbi_free(j);
            j = NULL;
        }
    }
    pthread_mutex_lock(&py.lock);
    bool ok = start_thread(NULL) == NB_OK;
    if (ok && j) enqueue(j);
    pthread_mutex_unlock(&py.lock);
    if (!ok && j) {
        nbi_free(j->owned);
        nbi_free(j);
    }
}

void nbi_python_forget(uint64_t id)
{
    pthread_mutex_lock(&py.lock);
    job *j = py.started && !py.stopping ? nbi_calloc(1, sizeof *j) : NULL;
    if (j) {
        j->kind = JOB_FORGET;
        j->text.id = id;
        enqueue(j);
    }
    pthread_mutex_unlock(&py.lock);
}

bool nbi_python_stop(uint32_t wait_ms)
{
    uint64_t end = nbi_now_ns() + (uint64_t)wait_ms * 1000000u;
    pthread_mutex_lock(&py.lock);
    bool join = py.started && !py.stopping;
    py.stopping = true;
    pthread_cond_signal(&py.work);
    for (uint64_t now; py.started && !py.ended && (now = nbi_now_ns()) < end;)
        wait_changed(end - now);
    bool ended = !py.started || py.ended;
    pthread_mutex_unlock(&py.lock);
    if (join && ended) pthread_join(py.thread, NULL);
    return ended;
}

#endif
