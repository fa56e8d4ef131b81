{{/* The Deployment that router, prefill and decode have in common.

Decode is a Deployment as well, not a StatefulSet: a worker has no identity that outlives its process. It registers under an id that is
random each time it starts, at its pod's address; its KV pool is memory and gone with it; requests it was answering are placed again
elsewhere. Stable names, ordered starts and a volume for each ordinal would buy nothing and make rollouts slower. Nor do workers need a
Service: the router finds them, and they find each other, through the registry. A KV store has a disk that outlives its process, and so is a
StatefulSet (kv-store.yaml) with the same pods. */}}

{{/* Takes root and role. */}}
{{- define "baton.deployment" -}}
{{- $c := get .root.Values (include "baton.key" .) -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
  annotations:
    {{- include "baton.workloadAnnotations" . | nindent 4 }}
spec:
  {{- if not $c.autoscaling.enabled }}
  replicas: {{ include "baton.replicas" . }}
  {{- end }}
  strategy:
    {{- if and (eq .role "router") (eq .root.Values.registry.type "embedded") }}
    # Two routers would each know some of the workers.
    type: Recreate
    {{- else }}
    type: RollingUpdate
    rollingUpdate:
      maxSurge: {{ $c.rollout.maxSurge }}
      maxUnavailable: {{ $c.rollout.maxUnavailable }}
    {{- end }}
  {{- if ne .role "router" }}
  # The pod before goes when all routers know this one. A router that has just lost etcd hears of it up to 7 s late.
  minReadySeconds: 10
  {{- end }}
  # A rollout that stands still is reported when a pod had its time to load the model, and some.
  progressDeadlineSeconds: {{ add ($c.startupSeconds | default 600 | int) 300 }}
  selector:
    matchLabels:
      {{- include "baton.selector" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "baton.podLabels" . | nindent 8 }}
      annotations:
        {{- include "baton.podAnnotations" . | nindent 8 }}
    spec:
      {{- include "baton.podSpec" . | nindent 6 }}
{{- end -}}

{{/* Of a Deployment or StatefulSet. Takes root and role. */}}
{{- define "baton.workloadAnnotations" -}}
{{- $c := get .root.Values (include "baton.key" .) -}}
{{- if not ($c.autoscaling).enabled }}
{{ include "baton.replicasAnnotation" . }}: {{ int $c.replicas | quote }}
{{- end }}
# What the next upgrade, and `baton status`, want to know.
baton/tls: {{ include "baton.tls" .root }}
{{- if ne (include "baton.tls" .root) "none" }}
baton/operator-secret: {{ include "baton.tlsPrefix" .root }}-operator
{{- end }}
{{- end -}}

{{/* The workload of a role as it is in the cluster; empty where there is none. Takes root and role. */}}
{{- define "baton.live" -}}
{{- $kind := eq .role "kv-store" | ternary "StatefulSet" "Deployment" -}}
{{- lookup "apps/v1" $kind .root.Release.Namespace (printf "%s-%s" (include "baton.fullname" .root) .role) | default dict | toYaml -}}
{{- end -}}

{{/* What the values said of the replicas when they were last applied. */}}
{{- define "baton.replicasAnnotation" -}}baton/replicas{{- end -}}

{{/* How many pods: as the values say; but while they say what they said before, what `baton scale` has made of it stays. Otherwise every upgrade
would undo it, or fail: Helm refuses to change what another program has set. Takes root and role. */}}
{{- define "baton.replicas" -}}
{{- $c := get .root.Values (include "baton.key" .) -}}
{{- $live := include "baton.live" . | fromYaml -}}
{{- $said := dig "metadata" "annotations" (include "baton.replicasAnnotation" .) "" $live -}}
{{- if eq $said (toString (int $c.replicas)) -}}
{{- int $live.spec.replicas -}}
{{- else -}}
{{- int $c.replicas -}}
{{- end -}}
{{- end -}}

{{/* Whether a prefill or decode worker computes on GPUs; empty: it does not. Takes root and role. */}}
{{- define "baton.onGpus" -}}
{{- $backend := toString (get (include "baton.settings" . | fromYaml) "backend") -}}
{{- $gpus := hasKey ((get .root.Values .role).resources.limits | default dict) "nvidia.com/gpu" -}}
{{- if or (eq $backend "cuda") (and $gpus (ne $backend "cpu")) -}}true{{- end -}}
{{- end -}}

{{/* Name of the image: with neither a digest nor a tag, the one that has kernels for GPUs where the role computes on them. Takes root and role. */}}
{{- define "baton.roleImage" -}}
{{- $version := .root.Chart.AppVersion -}}
{{- if and (has .role (list "prefill" "decode")) (include "baton.onGpus" .) -}}
  {{- $version = printf "%s-cuda" $version -}}
{{- end -}}
{{- include "baton.image" (dict "image" .root.Values.image "version" $version) -}}
{{- end -}}

{{/* Labels of the pods: those that select them, and the user's, which cannot replace them. No versions, which would start all pods again with
every new chart. Takes root and role. */}}
{{- define "baton.podLabels" -}}
{{- $c := get .root.Values (include "baton.key" .) -}}
{{- toYaml (merge (include "baton.selector" . | fromYaml) $c.podLabels) -}}
{{- end -}}

{{/* Takes root and role. */}}
{{- define "baton.podAnnotations" -}}
{{- $c := get .root.Values (include "baton.key" .) -}}
{{- $annotations := dict "kubectl.kubernetes.io/default-container" "baton" -}}
{{- if .root.Values.monitoring.annotations -}}
{{- $port := (include "baton.ports" .root | fromYaml).admin | toString -}}
{{- $annotations = merge $annotations (dict "prometheus.io/scrape" "true" "prometheus.io/port" $port "prometheus.io/path" "/metrics") -}}
{{- end -}}
{{- if and (ne .role "router") .root.Values.workers.rdma.network -}}
{{- $_ := set $annotations "k8s.v1.cni.cncf.io/networks" .root.Values.workers.rdma.network -}}
{{- end -}}
{{- /* The binary reads its file once: another file means another pod. */ -}}
{{- $_ := set $annotations "checksum/config" (include "baton.settings" . | sha256sum) -}}
{{- toYaml (mergeOverwrite (deepCopy $c.podAnnotations) $annotations) -}}
{{- end -}}

{{/* Takes root and role. */}}
{{- define "baton.podSpec" -}}
{{- $v := .root.Values -}}
{{- $c := get $v (include "baton.key" .) -}}
serviceAccountName: {{ include "baton.serviceAccountName" .root }}
automountServiceAccountToken: false
# A Service called baton-grpc would otherwise put BATON_GRPC_… among the settings.
enableServiceLinks: false
{{- with $v.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and (ne .role "router") $v.workers.hostNetwork }}
hostNetwork: true
# Without it, pods in a node's network do not find Services.
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
securityContext:
  {{- toYaml $v.podSecurityContext | nindent 2 }}
# Longer than the drain, so that it ends by itself.
terminationGracePeriodSeconds: {{ add (int ($c.preStopSeconds | default 0)) (int $c.drainSeconds) 15 }}
{{- include "baton.scheduling" . }}
{{- $disk := and (eq .role "kv-store") $v.kvStore.disk.size }}
{{- $prepare := dict }}
{{- if and (ne .role "router") $v.workers.sockets.hostPath $v.workers.sockets.prepare }}
{{- $_ := set $prepare "sockets" (include "baton.socketsPath" .root) }}
{{- end }}
{{- if and $disk (eq $v.kvStore.disk.type "hostPath") $v.kvStore.disk.hostPath.prepare }}
{{- $_ := set $prepare "kv" (include "baton.kvDiskPath" .root) }}
{{- end }}
{{- $fetch := and (ne .role "router") (include "baton.modelIsFetched" .root) }}
{{- if or $prepare $fetch }}
initContainers:
  {{- if $fetch }}
  {{- include "baton.fetchContainer" . | nindent 2 }}
  {{- end }}
  {{- range $name, $path := $prepare }}
  - name: {{ $name }}
    image: {{ include "baton.roleImage" $ | quote }}
    imagePullPolicy: {{ $v.image.pullPolicy }}
    command: [install, -d, -o, {{ $v.podSecurityContext.runAsUser | quote }}, -g, {{ $v.podSecurityContext.runAsGroup | quote }}, -m, "0700", {{ $path }}]
    securityContext:
      runAsUser: 0
      runAsNonRoot: false
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL], add: [CHOWN, FOWNER]}
    volumeMounts:
      - {name: {{ $name }}, mountPath: {{ $path }}}
  {{- end }}
{{- end }}
containers:
  - name: baton
    image: {{ include "baton.roleImage" . | quote }}
    imagePullPolicy: {{ $v.image.pullPolicy }}
    {{- if and (ne .role "router") $v.workers.rdma.ipcLock }}
    # What Kubernetes adds to a container, a user other than root gets by a program with that capability.
    command: [with-ipc-lock, --inh-caps=+ipc_lock, --ambient-caps=+ipc_lock, baton]
    {{- end }}
    args: [{{ .role }}, --config, /etc/baton/baton.toml]
    {{- with include "baton.env" . | trim }}
    env:
      {{- . | nindent 6 }}
    {{- end }}
    ports:
      {{- include "baton.containerPorts" . | trim | nindent 6 }}
    {{- include "baton.probes" . | nindent 4 }}
    {{- if $c.preStopSeconds }}
    lifecycle:
      preStop:
        exec:
          command: [sleep, {{ $c.preStopSeconds | quote }}]
    {{- end }}
    securityContext:
      {{- include "baton.securityContext" . | nindent 6 }}
    {{- with include "baton.resources" . | fromYaml }}
    resources:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    volumeMounts:
      - {name: config, mountPath: /etc/baton, readOnly: true}
      - {name: models, mountPath: {{ include "baton.modelCachePath" .root }}}
      - {name: tmp, mountPath: /tmp}
      {{- if $v.hub.token.secretName }}
      - {name: hub-token, mountPath: {{ include "baton.hubTokenPath" .root | dir }}, readOnly: true}
      {{- end }}
      {{- if ne (include "baton.tls" .root) "none" }}
      - {name: tls, mountPath: {{ include "baton.tlsPath" .root }}, readOnly: true}
      {{- end }}
      {{- if include "baton.kvSecret" .root }}
      - {name: kv-secret, mountPath: {{ include "baton.kvSecretPath" .root | dir }}, readOnly: true}
      {{- end }}
      {{- if and (eq .role "router") $v.keys.secretName }}
      # The folder, not the file alone: that would not change with the Secret.
      - {name: keys, mountPath: {{ include "baton.keysPath" .root | dir }}, readOnly: true}
      {{- end }}
      {{- if and (ne .role "router") $v.workers.sockets.hostPath }}
      - {name: sockets, mountPath: {{ include "baton.socketsPath" .root }}}
      {{- end }}
      {{- if and (ne .role "router") $v.workers.shm.sizeLimit }}
      - {name: shm, mountPath: /dev/shm}
      {{- end }}
      {{- if $disk }}
      - {name: kv, mountPath: {{ include "baton.kvDiskPath" .root }}}
      {{- end }}
      {{- with $c.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
volumes:
  {{- with $v.hub.token }}
  {{- if .secretName }}
  - name: hub-token
    secret:
      secretName: {{ .secretName }}
      items: [{key: {{ .key | quote }}, path: {{ include "baton.hubTokenPath" $ | base }}}]
  {{- end }}
  {{- end }}
  {{- if ne (include "baton.tls" .root) "none" }}
  - name: tls
    secret: {secretName: {{ include "baton.tlsPrefix" .root }}-{{ include "baton.tlsHolder" . }}}
  {{- end }}
  {{- with include "baton.kvSecret" .root }}
  - name: kv-secret
    secret:
      secretName: {{ . }}
      items: [{key: {{ $v.kvSecret.key | quote }}, path: {{ include "baton.kvSecretPath" $ | base }}}]
  {{- end }}
  {{- if and (eq .role "router") $v.keys.secretName }}
  - name: keys
    secret:
      secretName: {{ $v.keys.secretName }}
      items: [{key: {{ $v.keys.key | quote }}, path: {{ include "baton.keysPath" .root | base }}}]
  {{- end }}
  {{- if and (ne .role "router") $v.workers.sockets.hostPath }}
  - name: sockets
    hostPath: {path: {{ $v.workers.sockets.hostPath | quote }}, type: DirectoryOrCreate}
  {{- end }}
  {{- if and (ne .role "router") $v.workers.shm.sizeLimit }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $v.workers.shm.sizeLimit | quote }}}
  {{- end }}
  {{- if and $disk (ne $v.kvStore.disk.type "claim") }}
  - name: kv
    {{- include "baton.kvDiskVolume" .root | nindent 4 }}
  {{- end }}
  - name: config
    configMap:
      name: {{ include "baton.fullname" .root }}-{{ .role }}
  - name: models
    {{- include "baton.modelVolume" .root | nindent 4 }}
  - name: tmp
    emptyDir: {}
  {{- with $c.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Takes root and role. */}}
{{- define "baton.securityContext" -}}
{{- $context := deepCopy .root.Values.securityContext -}}
{{- if and (ne .role "router") .root.Values.workers.rdma.ipcLock -}}
  {{- $capabilities := $context.capabilities | default dict -}}
  {{- $_ := set $context "capabilities" (set $capabilities "add" (append ($capabilities.add | default list) "IPC_LOCK")) -}}
  {{- /* Else the kernel ignores what the program's file has. */ -}}
  {{- $_ := set $context "allowPrivilegeEscalation" true -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* What a container of the role gets. A worker asks for its RDMA devices, and for the disk that its own copy of the model, or a store's KV, may
take. Takes root and role. */}}
{{- define "baton.resources" -}}
{{- $c := get .root.Values (include "baton.key" .) -}}
{{- $cache := .root.Values.modelCache -}}
{{- $resources := deepCopy ($c.resources | default dict) -}}
{{- $disk := 0 -}}
{{- if eq .role "kv-store" -}}
  {{- $resources = include "baton.kvStoreResources" .root | fromYaml -}}
  {{- if eq $c.disk.type "emptyDir" -}}
    {{- $disk = int64 (include "baton.kvDiskBytes" .root | default 0) -}}
  {{- end -}}
{{- end -}}
{{- $rdma := .root.Values.workers.rdma -}}
{{- if and (ne .role "router") $rdma.resource -}}
  {{- $resources = merge $resources (dict "limits" (dict $rdma.resource (int $rdma.devices))) -}}
{{- end -}}
{{- if and (ne .role "router") (eq $cache.type "emptyDir") $cache.emptyDir.sizeLimit (include "baton.modelIsFetched" .root) -}}
  {{- $disk = add $disk (include "baton.bytes" $cache.emptyDir.sizeLimit) -}}
{{- end -}}
{{- if $disk -}}
  {{- $resources = merge $resources (dict "requests" (dict "ephemeral-storage" (printf "%dMi" (div $disk 1048576)))) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Fetches the model before the worker starts: for as long as it takes, with progress in its log. Takes root and role; with the role
"models", for the Job. */}}
{{- define "baton.fetchContainer" -}}
{{- $v := .root.Values -}}
- name: model
  image: {{ include "baton.roleImage" . | quote }}
  imagePullPolicy: {{ $v.image.pullPolicy }}
  args:
    - model
    - pull
    - {{ $v.model | quote }}
    - --model-cache={{ include "baton.modelCachePath" .root }}
    {{- if include "baton.sharesModels" .root }}
    {{- $peer := printf "http://%s-%%s-models:%v" (include "baton.fullname" .root) (include "baton.ports" .root | fromYaml).admin }}
    - --model-peers={{ printf $peer "prefill" }},{{ printf $peer "decode" }}
    {{- end }}
    {{- with $v.hub.endpoint }}
    - --hub-endpoint={{ . }}
    {{- end }}
    {{- if $v.hub.token.secretName }}
    - --hub-token-file={{ include "baton.hubTokenPath" .root }}
    {{- end }}
  {{- with get $v (include "baton.key" .) | default dict }}
  {{- with .extraEnv }}
  env:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  securityContext:
    {{- toYaml $v.securityContext | nindent 4 }}
  {{- if ne .role "models" }}
  {{- with include "baton.resources" . | fromYaml }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- else }}
  {{- with $v.modelCache.job.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  volumeMounts:
    - {name: models, mountPath: {{ include "baton.modelCachePath" .root }}}
    - {name: tmp, mountPath: /tmp}
    {{- if $v.hub.token.secretName }}
    - {name: hub-token, mountPath: {{ include "baton.hubTokenPath" .root | dir }}, readOnly: true}
    {{- end }}
{{- end -}}

{{/* Whether workers give the files of their model to those that start. Takes the root. */}}
{{- define "baton.sharesModels" -}}
{{- if and (eq .Values.modelCache.type "emptyDir") .Values.modelCache.emptyDir.share }}true{{ end -}}
{{- end -}}

{{/* Whether the model comes from a registry or a hub; empty: it is a path, or made. Takes the root. */}}
{{- define "baton.modelIsFetched" -}}
{{- if not (or (hasPrefix "/" .Values.model) (hasPrefix "./" .Values.model) (hasPrefix "random:" .Values.model)) -}}true{{- end -}}
{{- end -}}

{{/* What only the pod knows, then the user's. Takes root and role. */}}
{{- define "baton.env" -}}
{{- $v := .root.Values -}}
{{- $c := get $v (include "baton.key" .) -}}
{{- if ne .role "router" }}
{{- if eq $v.ipFamily "IPv6" }}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: BATON_ADVERTISE
  value: "[$(POD_IP)]"
{{- else }}
- name: BATON_ADVERTISE
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
{{- $settings := include "baton.settings" . | fromYaml }}
{{- $resources := merge (dict) ($c.resources.requests | default dict) ($c.resources.limits | default dict) }}
{{- if and (ne .role "kv-store") (hasKey $resources "cpu") (not (hasKey $settings "threads")) }}
# As many as CPUs requested, rounded up, not as many as the node has.
- name: BATON_THREADS
  valueFrom: {resourceFieldRef: {containerName: baton, resource: requests.cpu, divisor: "1"}}
{{- end }}
{{- if and (eq .role "kv-store") $v.kvStore.disk.size }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
# A folder of its own, also where several stores share a volume.
- name: BATON_KV_DISK
  value: {{ include "baton.kvDiskPath" .root }}/$(POD_NAME)
{{- end }}
{{- end }}
{{- $named := list -}}
{{- range $c.extraEnv }}
{{- $named = append $named .name -}}
{{- end }}
{{- $computes := list "auto" "cuda" | has (get (include "baton.settings" . | fromYaml) "backend") }}
{{- if not (or (and (ne .role "router") $computes) (has "NVIDIA_VISIBLE_DEVICES" $named)) }}
# The image for GPUs asks for all of a node's, which a container gets where NVIDIA's runtime is the default.
- name: NVIDIA_VISIBLE_DEVICES
  value: void
{{- end }}
{{- with $c.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Takes root and role. */}}
{{- define "baton.containerPorts" -}}
{{- $ports := include "baton.ports" .root | fromYaml -}}
{{- if eq .role "router" }}
- {name: http, containerPort: {{ $ports.http }}}
- {name: grpc, containerPort: {{ $ports.grpc }}}
{{- if eq .root.Values.registry.type "embedded" }}
- {name: internal, containerPort: {{ $ports.internal }}}
{{- end }}
{{- else }}
- {name: grpc, containerPort: {{ $ports.internal }}}
{{- end }}
{{- if ne .role "router" }}
- {name: transfer, containerPort: {{ $ports.transfer }}}
{{- end }}
- {name: admin, containerPort: {{ $ports.admin }}}
{{- end -}}

{{/* The admin endpoint answers before the model is there. A worker has started once it has loaded and joined the cluster; a router is
ready once there were workers, so for a router starting means no more than being alive. Takes root and role. */}}
{{- define "baton.probes" -}}
{{- $c := get .root.Values (include "baton.key" .) -}}
startupProbe:
  {{- if eq .role "router" }}
  httpGet: {path: /health, port: admin}
  periodSeconds: 2
  failureThreshold: 30
  {{- else }}
  httpGet: {path: /ready, port: admin}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ max 1 (ceil (divf $c.startupSeconds 5)) }}
  {{- end }}
livenessProbe:
  httpGet: {path: /health, port: admin}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /ready, port: admin}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end -}}

{{/* The volume of fetched models. Takes the root. */}}
{{- define "baton.modelVolume" -}}
{{- $cache := .Values.modelCache -}}
{{- if eq $cache.type "emptyDir" -}}
emptyDir: {{ with $cache.emptyDir.sizeLimit }}{sizeLimit: {{ . | quote }}}{{ else }}{}{{ end }}
{{- else if eq $cache.type "claim" -}}
persistentVolumeClaim: {claimName: {{ include "baton.fullname" . }}-models}
{{- else -}}
persistentVolumeClaim: {claimName: {{ $cache.existing.claimName }}}
{{- end -}}
{{- end -}}

{{/* Where pods run. Takes root and role. */}}
{{- define "baton.scheduling" -}}
{{- $c := get .root.Values (include "baton.key" .) -}}
{{- with $c.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $c.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $c.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $c.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "baton.affinity" . | fromYaml }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $c.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- $labels := include "baton.selector" . | fromYaml }}
  {{- range $c.topologySpreadConstraints }}
  - {{- toYaml (hasKey . "labelSelector" | ternary . (set (deepCopy .) "labelSelector" (dict "matchLabels" $labels))) | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The user's affinity, whose terms without a labelSelector mean the pods of the role, and that of prefill to decode unless the user has a
pod affinity of their own. Takes root and role. */}}
{{- define "baton.affinity" -}}
{{- $c := get .root.Values (include "baton.key" .) -}}
{{- $near := $c.nearDecode | default "none" -}}
{{- $affinity := deepCopy $c.affinity -}}
{{- $own := dict "matchLabels" (include "baton.selector" . | fromYaml) -}}
{{- range $kind := list "podAffinity" "podAntiAffinity" -}}
  {{- $pods := get $affinity $kind | default dict -}}
  {{- range $pods.requiredDuringSchedulingIgnoredDuringExecution -}}
    {{- $_ := set . "labelSelector" (.labelSelector | default $own) -}}
  {{- end -}}
  {{- range $pods.preferredDuringSchedulingIgnoredDuringExecution -}}
    {{- $_ := set .podAffinityTerm "labelSelector" (.podAffinityTerm.labelSelector | default $own) -}}
  {{- end -}}
{{- end -}}
{{- if ne $near "none" -}}
{{- $labels := include "baton.selector" (dict "root" .root "role" "decode") | fromYaml -}}
{{- $term := dict "labelSelector" (dict "matchLabels" $labels) "topologyKey" $c.nearDecodeTopologyKey -}}
{{- $pods := dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term) -}}
{{- if eq $near "preferred" -}}
{{- $pods = dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term)) -}}
{{- end -}}
{{- $affinity = merge $affinity (dict "podAffinity" $pods) -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}
