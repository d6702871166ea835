// Fails, kills or interrupts a process at its n-th system call that writes: whichever library makes it, without root.
//
// A seccomp filter traps the calls, so the kernel asks the handler here about each. The handler counts, and makes the
// call itself, with a mark in the sixth argument (which none of these calls has) that the filter lets pass.

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

namespace {

enum What { COUNT, KILL, FAIL, FAIL_ON, SIGNAL };
constexpr long MARK = 0x5eaf;
constexpr int CALLS = 4096;
constexpr int FILES = 1024;

struct Call {
    int number;
    int file;
};

Call log_[CALLS];
int count_ = 0;
int nth_ = 0;
int what_ = COUNT;
int value_ = 0;
bool written_[FILES];  // descriptors that were opened to be written

#if defined(__x86_64__)
long argument(const ucontext_t* context, int i) {
    const int registers[] = {REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8};
    return context->uc_mcontext.gregs[registers[i]];
}
void answer(ucontext_t* context, long value) { context->uc_mcontext.gregs[REG_RAX] = value; }
#elif defined(__aarch64__)
long argument(const ucontext_t* context, int i) { return static_cast<long>(context->uc_mcontext.regs[i]); }
void answer(ucontext_t* context, long value) { context->uc_mcontext.regs[0] = value; }
#else
#error "no registers known of this processor"
#endif

bool is_open(int number) { return number == SYS_openat; }
bool is_close(int number) { return number == SYS_close; }

bool writes(int number, const ucontext_t* context) {
    if (is_open(number)) {
        return (argument(context, 2) & (O_WRONLY | O_RDWR | O_CREAT)) != 0;
    }
    const long file = argument(context, 0);
    const bool known = file >= 0 && file < FILES;
    switch (number) {
        case SYS_write:
        case SYS_pwrite64:
        case SYS_writev:
        case SYS_ftruncate:
        case SYS_fallocate:
        case SYS_close:
            return known && written_[file];
        default:  // fsync, and what changes a folder
            return true;
    }
}

void handle(int, siginfo_t* info, void* raw) {
    auto* context = static_cast<ucontext_t*>(raw);
    const int number = info->si_syscall;
    bool fails = false;
    if (writes(number, context)) {
        if (count_ < CALLS) {
            log_[count_] = {number, static_cast<int>(argument(context, 0))};
        }
        const bool now = ++count_ == nth_ || (what_ == FAIL_ON && nth_ > 0 && count_ > nth_);
        if (now && what_ == KILL) {
            kill(getpid(), SIGKILL);
        }
        if (now && what_ == SIGNAL) {
            kill(getpid(), value_);
        }
        fails = now && (what_ == FAIL || what_ == FAIL_ON);
    }
    long result = 0;
    if (fails && !is_close(number)) {
        result = -value_;
    } else {  // a close that fails has closed
        result = syscall(number, argument(context, 0), argument(context, 1), argument(context, 2), argument(context, 3),
                         argument(context, 4), MARK);
        result = result == -1 ? -errno : result;
        result = fails ? -value_ : result;
    }
    if (is_close(number) && argument(context, 0) >= 0 && argument(context, 0) < FILES) {
        written_[argument(context, 0)] = false;
    }
    if (is_open(number) && result >= 0 && result < FILES) {
        written_[result] = (argument(context, 2) & (O_WRONLY | O_RDWR)) != 0;
    }
    answer(context, result);
}

}  // namespace

extern "C" {

// The nth call from now on fails with an error (`value`), kills, or sends a signal (`value`); 0: none does.
void plan(int nth, int what, int value) {
    count_ = 0;
    nth_ = nth;
    what_ = what;
    value_ = value;
}

// Counts calls from now on, and for ever; returns an error number.
int arm() {
    struct sigaction action;
    std::memset(&action, 0, sizeof action);
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSYS, &action, nullptr);
    const unsigned calls[] = {
        SYS_openat, SYS_write, SYS_pwrite64, SYS_writev, SYS_ftruncate, SYS_fallocate, SYS_close, SYS_fsync,
        SYS_fdatasync, SYS_mkdirat, SYS_unlinkat, SYS_renameat2, SYS_linkat, SYS_symlinkat,
#if defined(__x86_64__)
        SYS_mkdir, SYS_unlink, SYS_rmdir, SYS_rename, SYS_renameat,
#endif
    };
    constexpr unsigned number = sizeof calls / sizeof *calls;
    sock_filter filter[number + 5];
    unsigned n = 0;
    filter[n++] = BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[5]));
    filter[n++] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MARK, number + 1, 0);
    filter[n++] = BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr));
    for (unsigned i = 0; i < number; ++i) {
        filter[n++] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[i], static_cast<unsigned char>(number - i), 0);
    }
    filter[n++] = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    filter[n++] = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
    sock_fprog program = {static_cast<unsigned short>(n), filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) {
        return errno;
    }
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0 ? errno : 0;
}

int calls() { return count_; }
int file(int i) { return log_[i].file; }

const char* name(int i) {
    switch (log_[i].number) {
        case SYS_openat:
            return "open";
        case SYS_write:
        case SYS_pwrite64:
        case SYS_writev:
            return "write";
        case SYS_fsync:
            return "fsync";
        case SYS_close:
            return "close";
        case SYS_renameat2:
#if defined(__x86_64__)
        case SYS_rename:
        case SYS_renameat:
#endif
            return "rename";
        default:
            return "other";
    }
}
}
