"""One operation, several implementations: what is installed and fastest is chosen here, once, and said once.

backends          what this machine has, and the choices that follow
matmul            the three products of a linear layer by the chosen kernel
grouped_matmul    the same of several experts at once
permute           rows sorted by expert, and back
wgrad             a weight's gradient straight into `main_grad`
bias_activation   bias, activation and gate in one go
bias_dropout_add  the end of each half of a layer
rope              rotary position embedding
norm              RMSNorm with few passes over memory
attention         attention as batched products
block_attention   attention on a part of the keys, and how parts are put together
cross_entropy     softmax cross entropy in blocks of rows
"""
