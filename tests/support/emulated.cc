// Calls one handler of a library of kernels as XLA does, so that it runs under an emulator, which XLA itself does not:
//
//     emulated LIBRARY SYMBOL < call > results
//
// A call is numbers of int64 and bytes (tests/support/emulated.py writes it). Every buffer ends where memory does.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "xla/ffi/api/c_api.h"

static std::deque<std::thread> pool;

extern "C" {
static XLA_FFI_Error* Fail(XLA_FFI_Error_Create_Args* args) { return reinterpret_cast<XLA_FFI_Error*>(strdup(args->message)); }
static XLA_FFI_Error* Threads(XLA_FFI_ThreadPool_NumThreads_Args* args) { return *args->num_threads = 2, nullptr; }
static XLA_FFI_Error* Schedule(XLA_FFI_ThreadPool_Schedule_Args* args) { return pool.emplace_back(args->task, args->data), nullptr; }
}

static int64_t Number() {
  int64_t value;
  if (fread(&value, sizeof value, 1, stdin) != 1) exit(2);
  return value;
}

// Memory of which nothing behind the last byte can be read.
static char* Memory(int64_t bytes) {
  const int64_t page = 1 << 16, pages = (bytes + page - 1) / page + 1;
  char* const first = static_cast<char*>(mmap(nullptr, pages * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (first == MAP_FAILED || mprotect(first + (pages - 1) * page, page, PROT_NONE)) exit(3);
  return first + (pages - 1) * page - bytes;
}

struct Array : XLA_FFI_Buffer {
  std::vector<int64_t> sizes;
  int64_t bytes;

  Array() {
    struct_size = XLA_FFI_Buffer_STRUCT_SIZE, extension_start = nullptr;
    dtype = XLA_FFI_DataType(Number()), rank = Number();
    for (int64_t i = 0; i < rank; ++i) sizes.push_back(Number());
    dims = sizes.data(), bytes = Number(), data = Memory(bytes);
  }
};

int main(int, char** argv) {
  void* const library = dlopen(argv[1], RTLD_NOW);
  const auto handler = reinterpret_cast<XLA_FFI_Handler*>(library ? dlsym(library, argv[2]) : nullptr);
  if (!handler) return fprintf(stderr, "%s\n", dlerror()), 4;
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = Fail, api.XLA_FFI_ThreadPool_NumThreads = Threads, api.XLA_FFI_ThreadPool_Schedule = Schedule;
  std::deque<Array> arrays, results;
  std::vector<void*> args, rets, attrs;
  for (int64_t i = Number(); i > 0; --i) {
    Array& array = arrays.emplace_back();
    if (fread(array.data, 1, array.bytes, stdin) != size_t(array.bytes)) return 2;
    args.push_back(&array);
  }
  for (int64_t i = Number(); i > 0; --i) {
    Array& array = results.emplace_back();
    if (const int64_t same = Number(); same >= 0) array.data = arrays[same].data;
    rets.push_back(&array);
  }
  std::deque<std::string> texts;
  std::deque<XLA_FFI_ByteSpan> spans;
  std::deque<XLA_FFI_Scalar> scalars;
  std::vector<XLA_FFI_ByteSpan*> names;
  for (int64_t i = Number(); i > 0; --i) {  // sorted by name
    std::string& text = texts.emplace_back(Number(), ' ');
    if (fread(&text[0], 1, text.size(), stdin) != text.size()) return 2;
    names.push_back(&spans.emplace_back(XLA_FFI_ByteSpan{text.data(), text.size()}));
    const auto dtype = XLA_FFI_DataType(Number());
    attrs.push_back(&scalars.emplace_back(XLA_FFI_Scalar{dtype, Memory(4)}));
    const int32_t bits = int32_t(Number());
    memcpy(scalars.back().value, &bits, 4);
  }
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
  std::vector<XLA_FFI_AttrType> attr_types(attrs.size(), XLA_FFI_AttrType_SCALAR);
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE, frame.api = &api, frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, int64_t(args.size()), arg_types.data(), args.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, int64_t(rets.size()), ret_types.data(), rets.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, int64_t(attrs.size()), attr_types.data(), names.data(), attrs.data()};
  XLA_FFI_Error* const error = handler(&frame);
  for (std::thread& each : pool) each.join();
  if (error) return fprintf(stderr, "%s\n", reinterpret_cast<char*>(error)), 1;
  for (const Array& array : results) fwrite(array.data, 1, array.bytes, stdout);
  return fflush(stdout);
}
