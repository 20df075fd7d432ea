# NCCL, over which GPUs of several processes talk. Looked for only where there is CUDA; without it
# one line says what to set, and GPUs still work in one process. Sets LOCKSTEP_HAS_NCCL and the
# target lockstep_nccl.

set(LOCKSTEP_HAS_NCCL OFF)
if(NOT LOCKSTEP_HAS_CUDA)
  return()
endif()
set(LOCKSTEP_NCCL_ROOT "" CACHE PATH "The folder above NCCL's include/ and lib/, if not a usual one")

# A named folder is the only one that counts. pip's package has no libnccl.so, only libnccl.so.2.
function(lockstep_find_nccl)
  set(where ${ARGN})
  if(LOCKSTEP_NCCL_ROOT)
    set(where ${LOCKSTEP_NCCL_ROOT} NO_DEFAULT_PATH)
  endif()
  find_path(LOCKSTEP_NCCL_INCLUDE nccl.h HINTS ${where} PATH_SUFFIXES include)
  find_library(LOCKSTEP_NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${where}
               PATH_SUFFIXES lib lib64 lib/x86_64-linux-gnu lib/aarch64-linux-gnu)
  mark_as_advanced(LOCKSTEP_NCCL_INCLUDE LOCKSTEP_NCCL_LIBRARY)
endfunction()

cmake_path(GET CUDAToolkit_BIN_DIR PARENT_PATH toolkit)
lockstep_find_nccl(${toolkit})
if(NOT LOCKSTEP_NCCL_ROOT AND NOT (LOCKSTEP_NCCL_INCLUDE AND LOCKSTEP_NCCL_LIBRARY))
  execute_process(COMMAND python3 -c "import nvidia.nccl; print(nvidia.nccl.__path__[0])"
                  OUTPUT_VARIABLE pip OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(pip)
    lockstep_find_nccl(${pip})
  endif()
endif()
if(NOT LOCKSTEP_NCCL_INCLUDE OR NOT LOCKSTEP_NCCL_LIBRARY)
  message(STATUS "NCCL was not found, so GPUs can talk in one process only: name the folder above "
                 "its include/ and lib/ with -DLOCKSTEP_NCCL_ROOT=...")
  return()
endif()

# Linked only into programs that talk over it. It loads the driver by itself when it starts, so
# these programs, too, start on a machine without one.
set(LOCKSTEP_HAS_NCCL ON)
add_library(lockstep_nccl INTERFACE)
target_include_directories(lockstep_nccl SYSTEM INTERFACE ${LOCKSTEP_NCCL_INCLUDE})
target_link_libraries(lockstep_nccl INTERFACE ${LOCKSTEP_NCCL_LIBRARY})
target_link_options(lockstep_nccl INTERFACE LINKER:--as-needed)
message(STATUS "NCCL: ${LOCKSTEP_NCCL_LIBRARY}")
