/* What the kernel takes for the sends of one decode step: N connections over the loopback device,
 * one write of BYTES to each, then a pause, as a step of the model would be, in which MB of memory
 * are read where given, as a model reads its weights. No server: the floor of what
 * `tools/bench/scheduling.py cost` calls kernel.
 *
 *     cc -O2 -o send_floor tools/bench/send_floor.c
 *     ./send_floor [N [BYTES [PAUSE_US [MB [CPU READER_CPU]]]]]
 *
 * One line per way: "send", a system call each; "uring", all of a step submitted by one. CPU time
 * of the sending thread and time on the clock, microseconds per step, median of 300; another
 * process reads, on a processor of its own or on the sender's where both are named: where the
 * system chooses, figures of two runs may be a third apart. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/io_uring.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { STEPS = 300, MOST = 1024 };

static void check(int ok, const char *what)
{
    if (ok) return;
    perror(what);
    exit(1);
}

static double us(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

static void pin(const char *cpu)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)atoi(cpu), &set);
    check(sched_setaffinity(0, sizeof set, &set) == 0, "the processor");
}

static void read_all(const int *fds, int n)
{
    const int ep = epoll_create1(0);
    static char sink[65536];
    int open = n;
    for (int i = 0; i < n; i++) {
        struct epoll_event e = {.events = EPOLLIN, .data.fd = fds[i]};
        check(epoll_ctl(ep, EPOLL_CTL_ADD, fds[i], &e) == 0, "epoll_ctl");
    }
    while (open) {
        struct epoll_event events[64];
        const int m = epoll_wait(ep, events, 64, -1);
        for (int i = 0; i < m; i++)
            if (read(events[i].data.fd, sink, sizeof sink) <= 0) {
                close(events[i].data.fd);
                open--;
            }
    }
}

/* ---------------------------------------------------------------- io_uring, without its library */

static struct {
    int fd;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
} ring;

static int ring_open(unsigned entries)
{
    struct io_uring_params p = {.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN};
    ring.fd = (int)syscall(SYS_io_uring_setup, entries, &p);
    if (ring.fd < 0) return -1;
    const size_t size = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
    const size_t sq_size = p.sq_off.array + p.sq_entries * sizeof(unsigned);
    char *at = mmap(NULL, size > sq_size ? size : sq_size, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_SQ_RING);
    check(at != MAP_FAILED, "mmap");
    ring.sqes = mmap(NULL, p.sq_entries * sizeof(struct io_uring_sqe), PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_SQES);
    check(ring.sqes != MAP_FAILED, "mmap");
    ring.sq_tail = (unsigned *)(at + p.sq_off.tail);
    ring.sq_mask = (unsigned *)(at + p.sq_off.ring_mask);
    ring.sq_array = (unsigned *)(at + p.sq_off.array);
    ring.cq_head = (unsigned *)(at + p.cq_off.head);
    ring.cq_tail = (unsigned *)(at + p.cq_off.tail);
    ring.cq_mask = (unsigned *)(at + p.cq_off.ring_mask);
    ring.cqes = (struct io_uring_cqe *)(at + p.cq_off.cqes);
    return 0;
}

static void ring_send(const int *fds, int n, const char *data, size_t bytes)
{
    unsigned tail = *ring.sq_tail;
    for (int i = 0; i < n; i++, tail++) {
        const unsigned at = tail & *ring.sq_mask;
        ring.sqes[at] = (struct io_uring_sqe){.opcode = IORING_OP_SEND,
                                              .fd = fds[i],
                                              .addr = (uintptr_t)data,
                                              .len = (unsigned)bytes,
                                              .msg_flags = MSG_DONTWAIT | MSG_NOSIGNAL};
        ring.sq_array[at] = at;
    }
    __atomic_store_n(ring.sq_tail, tail, __ATOMIC_RELEASE);
    check(syscall(SYS_io_uring_enter, ring.fd, n, n, IORING_ENTER_GETEVENTS, NULL, 0) == n,
          "io_uring_enter");
    unsigned head = *ring.cq_head;
    for (int i = 0; i < n; i++, head++)
        check(ring.cqes[head & *ring.cq_mask].res == (int)bytes, "a send of the ring");
    __atomic_store_n(ring.cq_head, head, __ATOMIC_RELEASE);
}

/* ---------------------------------------------------------------- */

static void plain_send(const int *fds, int n, const char *data, size_t bytes)
{
    for (int i = 0; i < n; i++)
        check(send(fds[i], data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)bytes, "send");
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    const int n = argc > 1 ? atoi(argv[1]) : 256, pause_us = argc > 3 ? atoi(argv[3]) : 3000;
    const size_t bytes = argc > 2 ? (size_t)atoi(argv[2]) : 200;
    const size_t megabytes = argc > 4 ? (size_t)atoi(argv[4]) : 0;
    volatile char *memory = calloc(megabytes + 1, 1 << 20);
    static int out[MOST], in[MOST];
    unsigned sum = 0;
    check(memory != NULL, "calloc");
    for (size_t i = 0; i < megabytes << 20; i += 4096) memory[i] = 1;
    static char data[65536];
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    check(n > 0 && n <= MOST && bytes > 0 && bytes <= sizeof data, "arguments");
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    check(bind(listener, (struct sockaddr *)&at, size) == 0 && listen(listener, MOST) == 0,
          "listen");
    getsockname(listener, (struct sockaddr *)&at, &size);
    for (int i = 0; i < n; i++) {
        const int one = 1;
        in[i] = socket(AF_INET, SOCK_STREAM, 0);
        check(connect(in[i], (struct sockaddr *)&at, size) == 0, "connect");
        out[i] = accept(listener, NULL, NULL);
        setsockopt(out[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    const pid_t reader = fork();
    if (!reader) {
        if (argc > 6) pin(argv[6]);
        for (int i = 0; i < n; i++) close(out[i]);
        read_all(in, n);
        _exit(0);
    }
    if (argc > 6) pin(argv[5]);
    for (int i = 0; i < n; i++) close(in[i]);
    const int has_ring = ring_open(MOST) == 0;
    static double cpu[2][STEPS], clock_us[2][STEPS];
    for (int step = -20; step < STEPS; step++)
        for (int way = 0; way < 1 + has_ring; way++) {
            usleep((useconds_t)pause_us);
            for (size_t i = 0; i < megabytes << 20; i += 64) sum += memory[i];
            const double cpu0 = us(CLOCK_THREAD_CPUTIME_ID), wall0 = us(CLOCK_MONOTONIC);
            (way ? ring_send : plain_send)(out, n, data, bytes);
            if (step < 0) continue;
            cpu[way][step] = us(CLOCK_THREAD_CPUTIME_ID) - cpu0;
            clock_us[way][step] = us(CLOCK_MONOTONIC) - wall0;
        }
    for (int way = 0; way < 1 + has_ring; way++) {
        qsort(cpu[way], STEPS, sizeof(double), ascending);
        qsort(clock_us[way], STEPS, sizeof(double), ascending);
        printf("%-5s %d x %zu bytes: CPU %.0f us a step, %.2f a send; clock %.0f us\n",
               way ? "uring" : "send", n, bytes, cpu[way][STEPS / 2], cpu[way][STEPS / 2] / n,
               clock_us[way][STEPS / 2]);
    }
    for (int i = 0; i < n; i++) close(out[i]);
    waitpid(reader, NULL, 0);
    return sum == 1;
}
