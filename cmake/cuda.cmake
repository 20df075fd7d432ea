# Is there a CUDA compiler, and which GPUs do we compile for? Sets LOCKSTEP_HAS_CUDA and, where that
# is true, LOCKSTEP_CUDA_ARCHITECTURES and the target lockstep_cuda. A machine without nvcc sees not
# one word about CUDA: nothing is looked for beyond this one search for the compiler.

set(LOCKSTEP_CUDA_SEARCH_PATHS /usr/local/cuda/bin CACHE STRING "Where nvcc may be, beside PATH")
set(LOCKSTEP_HAS_CUDA OFF)
if(NOT LOCKSTEP_CUDA)
  return()
endif()

find_program(LOCKSTEP_NVCC nvcc PATHS ${LOCKSTEP_CUDA_SEARCH_PATHS} NO_CMAKE_SYSTEM_PATH)
mark_as_advanced(LOCKSTEP_NVCC)
if(NOT LOCKSTEP_NVCC)
  if(NOT LOCKSTEP_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "LOCKSTEP_CUDA=${LOCKSTEP_CUDA}, but nvcc is neither in PATH nor in "
                        "LOCKSTEP_CUDA_SEARCH_PATHS (${LOCKSTEP_CUDA_SEARCH_PATHS})")
  endif()
  return()
endif()

# AUTO falls back to the CPU with one line when what is there cannot be used; ON stops.
function(lockstep_without_cuda reason)
  if(LOCKSTEP_CUDA STREQUAL "AUTO")
    message(WARNING "building for the CPU only: ${reason}")
  else()
    message(FATAL_ERROR "${reason}")
  endif()
endfunction()

# The compiler must know C++20 (CUDA 12), accept the C++ compiler that it finds, and have cuBLAS.
if(NOT LOCKSTEP_NVCC_WORKS)
  file(WRITE ${PROJECT_BINARY_DIR}/CMakeFiles/nvcc_works.cu
       "#include <concepts>\n__global__ void nothing() {}\n")
  execute_process(COMMAND ${LOCKSTEP_NVCC} -std=c++20 -c nvcc_works.cu -o nvcc_works.o
                  WORKING_DIRECTORY ${PROJECT_BINARY_DIR}/CMakeFiles
                  RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    lockstep_without_cuda("${LOCKSTEP_NVCC} cannot compile C++20 here:\n${output}")
    return()
  endif()
  set(LOCKSTEP_NVCC_WORKS ON CACHE INTERNAL "")
endif()
cmake_path(GET LOCKSTEP_NVCC PARENT_PATH CUDAToolkit_ROOT)
find_package(CUDAToolkit QUIET)
if(NOT TARGET CUDA::cublasLt OR NOT TARGET CUDA::cudart_static)
  lockstep_without_cuda("${LOCKSTEP_NVCC} is there, but its libraries cuBLASLt and cudart are not")
  return()
endif()

# Architectures: what the GPUs of this machine need; without one, A100 and H100 and, where nvcc
# knows it, B200. "90a" is Hopper with its own instructions (wgmma, TMA), which 90 leaves out.
if(NOT LOCKSTEP_CUDA_ARCHITECTURES)
  execute_process(COMMAND ${LOCKSTEP_NVCC} --list-gpu-arch OUTPUT_VARIABLE known)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE present ERROR_QUIET)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]" present "${present}")
  string(REPLACE "." "" present "${present}")
  foreach(candidates IN ITEMS "${present}" "80;90;100")
    set(architectures ${candidates})
    list(FILTER architectures INCLUDE REGEX "^[0-9]+$")
    list(REMOVE_DUPLICATES architectures)
    list(SORT architectures COMPARE NATURAL)
    foreach(architecture IN LISTS architectures)
      if(NOT known MATCHES "compute_${architecture}[^0-9]")
        list(REMOVE_ITEM architectures ${architecture})
      endif()
    endforeach()
    if(architectures)
      break()
    endif()
  endforeach()
  list(TRANSFORM architectures REPLACE "^90$" "90a")
  set(LOCKSTEP_CUDA_ARCHITECTURES "${architectures}" CACHE STRING "e.g. 80;90a" FORCE)
endif()
string(REPLACE " " ";" architectures "${LOCKSTEP_CUDA_ARCHITECTURES}")

# Machine code for each, and PTX of the lowest, which the driver of any newer GPU compiles at start.
set(gencode "")
foreach(architecture IN LISTS architectures)
  list(APPEND gencode "SHELL:-gencode arch=compute_${architecture},code=sm_${architecture}")
endforeach()
list(GET architectures 0 lowest)
if(lowest MATCHES "^[0-9]+$")
  list(APPEND gencode "SHELL:-gencode arch=compute_${lowest},code=compute_${lowest}")
endif()

set(CMAKE_CUDA_COMPILER ${LOCKSTEP_NVCC})
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20) # CMake 3.25 does not know it yet
set(LOCKSTEP_HAS_CUDA ON)

# Never libcuda itself: a program that links it does not start on a machine without a driver.
add_library(lockstep_cuda INTERFACE)
target_link_libraries(lockstep_cuda INTERFACE CUDA::cudart_static CUDA::cublas CUDA::cublasLt)
target_compile_options(lockstep_cuda INTERFACE
                       "$<$<COMPILE_LANGUAGE:CUDA>:-lineinfo;-Xcompiler=-Wall;${gencode}>")
string(REPLACE ";" " " compiled "${architectures}")
set_source_files_properties(common/device_cuda.cpp PROPERTIES COMPILE_DEFINITIONS
                            "LOCKSTEP_COMPILED_ARCHITECTURES=\"${compiled}\"")
message(STATUS "CUDA architectures: ${compiled}")
