"""Operations of decoders (attention, products, recurrent layers, sampling) by PyTorch, C++ on CPUs, or Triton."""
