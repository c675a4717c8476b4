// An empty server, an open-loop and a closed-loop client in C, to compare the load generator with.
//
//   cc -O2 -o load_native benchmarks/load_native.c -lm
//   ./load_native serve PORT [MICROSECONDS]      answers every request with one fixed result
//   ./load_native open PORT RATE SECONDS FILE    sends FILE's bytes at exponential intervals
//   ./load_native closed PORT COUNT SECONDS FILE sends them again on each of COUNT connections
//
// The server answers GET too, so that `deploykit load` finds a model; with MICROSECONDS it sleeps
// before each answer. The clients print "p50 p90 p99 sent" (microseconds from the intended time), and
// "requests/s, microseconds of processor time for each".
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define CONNECTIONS 64
static const char *OUT =
    "{\"outputs\":[{\"name\":\"y\",\"datatype\":\"FP32\",\"shape\":[1,10],"
    "\"parameters\":{\"binary_data_size\":40}}]}";
static const char *META =
    "{\"name\":\"m\",\"versions\":[\"1\"],\"platform\":\"native\",\"inputs\":[{\"name\":\"x\","
    "\"datatype\":\"FP32\",\"shape\":[-1,256]}],\"outputs\":[{\"name\":\"y\","
    "\"datatype\":\"FP32\",\"shape\":[-1,10]}]}";

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static int answer(char *to, const char *path) {
    if (strstr(path, "/infer")) {
        int n = (int)strlen(OUT);
        int at = sprintf(to, "HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n"
            "Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n%s", n, n + 40, OUT);
        memset(to + at, 0, 40);
        return at + 40;
    }
    const char *body = META;
    if (strstr(path, "index")) body = "[{\"name\":\"m\",\"state\":\"READY\"}]";
    if (!strcmp(path, "/v2")) body = "{\"name\":\"native\",\"version\":\"1\",\"extensions\":[]}";
    return sprintf(to, "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%s", strlen(body), body);
}

static void serve(int port, int delay_us) {
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0), poll = epoll_create1(0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)&at, sizeof at) || listen(listener, 1024)) exit(1);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, events[256];
    epoll_ctl(poll, EPOLL_CTL_ADD, listener, &event);
    static char *held[4096];
    static int size[4096];
    for (;;) {
        int count = epoll_wait(poll, events, 256, -1);
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) {
                fd = accept4(listener, 0, 0, SOCK_NONBLOCK);
                if (fd < 0 || fd >= 4096) { close(fd); continue; }
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                if (!held[fd]) held[fd] = malloc(1 << 16);
                size[fd] = 0;
                event.events = EPOLLIN; event.data.fd = fd;
                epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event);
                continue;
            }
            ssize_t n = read(fd, held[fd] + size[fd], (1 << 16) - 1 - size[fd]);
            if (n <= 0) { close(fd); continue; }
            size[fd] += (int)n;
            held[fd][size[fd]] = 0;
            char *end = strstr(held[fd], "\r\n\r\n");
            if (!end) continue;
            char *length = strcasestr(held[fd], "\r\ncontent-length:");
            int body = length && length < end ? atoi(length + 17) : 0;
            if (size[fd] < end + 4 - held[fd] + body) continue;
            char path[512] = "", out[2048];
            sscanf(held[fd], "%*s %511s", path);
            if (delay_us && strstr(path, "/infer")) usleep(delay_us);
            size[fd] = 0;
            int bytes = answer(out, path);
            if (write(fd, out, bytes) != bytes) close(fd);
        }
    }
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void open_loop(int port, double rate, double seconds, const char *file) {
    static char request[1 << 16], in[1 << 16];
    FILE *opened = fopen(file, "rb");
    if (!opened) exit(1);
    int bytes = (int)fread(request, 1, sizeof request, opened), poll = epoll_create1(0), one = 1;
    int idle[CONNECTIONS], idles = 0;
    double *due = calloc(1 << 20, sizeof *due), start[4096], *taken = calloc(1 << 20, sizeof *taken);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < CONNECTIONS; i++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (void *)&at, sizeof at)) exit(1);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event);
        idle[idles++] = fd;
    }
    prctl(PR_SET_TIMERSLACK, 1);
    int total = 0, sent = 0, done = 0;
    for (double t = 0; (t -= log(1 - drand48()) / rate) < seconds && total < 1 << 20;) due[total++] = t;
    double zero = now();
    while (done < total && now() - zero < seconds + 5) {
        while (sent < total && due[sent] <= now() - zero && idles) {
            int fd = idle[--idles];
            start[fd] = due[sent++];
            if (write(fd, request, bytes) != bytes) exit(1);
        }
        double wait = sent < total ? due[sent] - (now() - zero) : 0.001;
        wait = wait < 0 ? 0 : wait;
        struct timespec until = {(time_t)wait, (long)((wait - (time_t)wait) * 1e9)};
        struct epoll_event events[64];
        int count = epoll_pwait2(poll, events, 64, &until, 0);
        double read_at = now() - zero;
        for (int i = 0; i < count; i++) {
            if (read(events[i].data.fd, in, sizeof in) <= 0) exit(1);
            taken[done++] = read_at - start[events[i].data.fd];
            idle[idles++] = events[i].data.fd;
        }
    }
    qsort(taken, done, sizeof *taken, ascending);
    printf("%.1f %.1f %.1f %d\n", taken[done / 2] * 1e6, taken[done * 9 / 10] * 1e6,
           taken[done * 99 / 100] * 1e6, done);
}

static double processor(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void closed_loop(int port, int connections, double seconds, const char *file) {
    static char request[1 << 16], in[1 << 16];
    FILE *opened = fopen(file, "rb");
    if (!opened) exit(1);
    int bytes = (int)fread(request, 1, sizeof request, opened), poll = epoll_create1(0), one = 1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < connections; i++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (void *)&at, sizeof at)) exit(1);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event);
        if (write(fd, request, bytes) != bytes) exit(1);
    }
    long done = 0;
    double zero = now(), used = processor();
    while (now() - zero < seconds) {
        struct epoll_event events[256];
        int count = epoll_wait(poll, events, 256, 1000);
        for (int i = 0; i < count; i++, done++) {
            if (read(events[i].data.fd, in, sizeof in) <= 0) exit(1);
            if (write(events[i].data.fd, request, bytes) != bytes) exit(1);
        }
    }
    printf("%.0f %.2f\n", done / (now() - zero), (processor() - used) / done * 1e6);
}

int main(int count, char **words) {
    if (count >= 3 && !strcmp(words[1], "serve")) serve(atoi(words[2]), count > 3 ? atoi(words[3]) : 0);
    if (count == 6 && !strcmp(words[1], "closed"))
        return closed_loop(atoi(words[2]), atoi(words[3]), atof(words[4]), words[5]), 0;
    if (count == 6) open_loop(atoi(words[2]), atof(words[3]), atof(words[4]), words[5]);
    return 1;
}
