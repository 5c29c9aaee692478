// Shifts the wall clock of every process that preloads it by the seconds that the file ATTACK_CLOCK holds, as a 64-bit
// number that may change at any moment. Clocks that count from a start are left alone, as the kernel leaves them.
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

namespace {

volatile const int64_t *mapped() {
    static volatile const int64_t zero = 0;
    const char *path = getenv("ATTACK_CLOCK");
    const int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return &zero;
    void *found = mmap(nullptr, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    return found == MAP_FAILED ? &zero : static_cast<volatile const int64_t *>(found);
}

int64_t shift() {
    static volatile const int64_t *const seconds = mapped();
    return *seconds;
}

int real(clockid_t clock, timespec *now) {
    static const auto next = reinterpret_cast<int (*)(clockid_t, timespec *)>(dlsym(RTLD_NEXT, "clock_gettime"));
    return next(clock, now);
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec *now) {
    const int status = real(clock, now);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
    return status;
}

int gettimeofday(timeval *__restrict now, void *__restrict) {
    timespec found{};
    real(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec + shift();
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *into) {
    timespec found{};
    real(CLOCK_REALTIME, &found);
    const time_t now = found.tv_sec + shift();
    if (into) *into = now;
    return now;
}
}
